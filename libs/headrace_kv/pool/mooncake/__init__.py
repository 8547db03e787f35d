"""The remote pool on Mooncake Store. Apart from the transport, the only package that imports mooncake."""
