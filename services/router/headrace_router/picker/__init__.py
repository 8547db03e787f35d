"""The Endpoint Picker: chooses the decode worker for requests of gateways. See docs/gateways.md."""
