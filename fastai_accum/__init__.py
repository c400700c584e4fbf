"""Gradient accumulation for fastai: train exactly as with the batch that did not fit

```python
_methods = [k for k,o in vars(Learner).items() if getattr(o, '__module__', '').startswith('fastai_accum') and o.__doc__]

class NoMethod(AttributeError):
    "Names the method that is meant, if one is; it looks only if somebody reads the error"
    def __str__(self):
        k = self.args[1]
        near = sorted([o for o in _methods if k in o and len(k)>4 or o in k], key=lambda o: o.find(k))
        near = near or get_close_matches(k, _methods, 1)
        return f'{self.args[0]}; did you mean learn.{near[0]}()?' if near else self.args[0]

def _getattr(self, k):
    try: return GetAttr.__getattr__(self, k)
    except AttributeError as e: raise NoMethod(str(e), k) from None
Learner.__getattr__ = _getattr   # `@patch` would make one of this module, too
```"""

__version__ = "0.3.0"

def __getattr__(name):
    "`from fastai_accum import AccumulateStep`, or `*`, works too; it loads fastai only then"
    from importlib import import_module,util
    if name=='__all__': return import_module(f'{__name__}.all').__all__
    if not name.startswith('_') and not util.find_spec(f'{__name__}.{name}'):
        module = import_module(f'{__name__}.all')
        if name in module.__all__: return getattr(module, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
