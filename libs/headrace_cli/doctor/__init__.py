"""The checks of `headrace doctor`, and the firewall rules that it writes."""
