"""Text to token batches: corpus, tokenizer, sampler."""
