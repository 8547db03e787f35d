"""The status page of operators: what the router knows of the deployment, as one HTML file and one JSON document."""
