"""Gradients of weights that are computed later than those of activations: what I leaves, and W takes up (decision 37).

`put_off` holds what one microbatch's I left and hands it to autograd in W, `products` are the products with a weight
that can be put off, `intercept` finds these in modules that know nothing of it. Must not know stages or schedules.
"""
