"""The Hugging Face Hub: reaching it, reading files there, downloading converted directories."""
