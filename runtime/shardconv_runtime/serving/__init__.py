"""The server behind ``shardconv_runtime.serve`` for clients of OpenAI's API."""
