"""From a Hugging Face model to a list of layers with flat host buffers."""
