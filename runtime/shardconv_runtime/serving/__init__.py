"""What ``shardconv_runtime.serve`` answers to clients of OpenAI's API."""
