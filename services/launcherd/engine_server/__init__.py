"""The embedded engine: llama.cpp's own server from the xllamacpp wheel, called like `llama-server`."""
