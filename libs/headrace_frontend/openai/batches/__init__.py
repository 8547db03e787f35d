"""Files and batches of the OpenAI API."""
