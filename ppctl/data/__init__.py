"""Text to token batches: corpus, tokenizer, sampler.

corpus         the documents of text files; indexed, indexed_writer: .bin and .idx files
blend          several corpora with weights
tokenizer      bytes, or a Hugging Face tokenizer (huggingface)
conversations  rendered by chat_template under template_limits; rows packs them (decision 55)
sampler        which samples a step takes: a pure function of (seed, step)
batches        tensors of a step; the only file that imports torch
load, examine  the data of a config, for ranks and for the launcher
"""
