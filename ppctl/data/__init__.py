"""Text to token batches: corpus, tokenizer, sampler.

text, corpus       the documents of text files and tables; indexed: .bin and .idx files
token_cache        tokens that are made once and kept (decision 94)
blend              several corpora with weights
tokenizer          bytes, or a Hugging Face tokenizer
conversations      rendered by chat_template in the process `rendering`; conversation_rows packs them (decision 55)
prompts            texts that a model continues
sampler            which samples a step takes: a pure function of (seed, step)
batches            tensors of a step; the only file that imports torch
load               the data of a config, for ranks and for the launcher
"""
