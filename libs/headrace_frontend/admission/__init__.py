"""Admission control: limits, tenants and fair shares."""
