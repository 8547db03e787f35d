"""The members of a deployment: what they report, as a table and for programs."""
