"""Stores of the registry: in memory and in etcd."""
