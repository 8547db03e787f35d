"""The Mooncake TransferEngine as a transport."""
