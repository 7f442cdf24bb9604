"""Weights' gradients, computed later than activations' gradients: deferred by I, computed by W (decision 37).

deferred   the weight gradients that one microbatch's I left, until W; delivery: how W hands them to autograd
products   the products with a weight whose gradient can be deferred
intercept  finds these in modules that know nothing of it
functions  others' autograd functions and modules, which are registered: split_backward; what stays in I, reported
"""
