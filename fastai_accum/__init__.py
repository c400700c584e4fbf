"Gradient accumulation that trains as the batch that did not fit: `from fastai_accum.all import *`"
__version__ = "0.3.0"
