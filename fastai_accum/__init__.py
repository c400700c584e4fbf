"""Gradient accumulation for fastai that trains exactly as the batch that did not fit

```python
from fastai_accum.loss import *
from fastai_accum.core import *
```"""

__version__ = "0.1.0"
