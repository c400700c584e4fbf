"""Gradient accumulation for fastai that trains exactly as the batch that did not fit

```python
from fastai_accum import loss,core
from fastai_accum.loss import *
from fastai_accum.core import *
```

```python
__all__ = [*loss.__all__, *core.__all__]
```"""

__version__ = "0.1.0"
