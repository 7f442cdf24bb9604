"""Weights' gradients, computed later than activations' gradients: deferred by I, computed by W (decision 37).

deferred   keeps the weight gradients that one microbatch's I left, until W; delivery: how W hands them to autograd
products   the products with a weight whose gradient can be deferred
intercept  finds such products in modules that know nothing of deferred gradients
functions  registers autograd functions and modules of others (split_backward), and reports what stays in I
"""
