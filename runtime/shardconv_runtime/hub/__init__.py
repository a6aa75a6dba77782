"""The Hugging Face Hub: how it is reached, files that stay there, converted directories that are fetched."""
