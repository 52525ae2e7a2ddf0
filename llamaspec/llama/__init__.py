"""The one room that touches llama.cpp: models, contexts, samplers, devices and its log.

Nothing else in llamaspec imports `llama_cpp`. Loading this package does not load the native library;
`library.load()` does, once, when the first model is opened.
"""
