"""The status page of operators: the router's view of the deployment, as one HTML file and one JSON document."""
