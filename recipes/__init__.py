"""One YAML per recipe, shipped as ppctl._recipes."""
