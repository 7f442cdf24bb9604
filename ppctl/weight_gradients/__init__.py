"""Gradients of weights that are computed later than those of activations: what I leaves, and W takes up (decision 37).

deferred   the weight gradients that one microbatch's I left, until W; delivery: how W hands them to autograd
products   the products with a weight whose gradient can be deferred
intercept  finds these in modules that know nothing of it
functions  others' autograd functions and modules, which are registered: split_backward; what stays in I, reported
"""
