"""A GPU's product that is added to a float32 sum, on a CPU: 16-bit products are exact in float32."""


def add_product_in_float32(own, a, b):
    """In place of `WideSum.add_product`."""
    made, total = a.float() @ b.float(), own.total()
    if total is None:
        own.begin(made)
    else:
        total.add_(made)
