"""Gradient accumulation for fastai: train exactly as with the batch that did not fit"""

__version__ = "0.3.0"

def __getattr__(name):
    "`from fastai_accum import AccumulateStep`, or `*`, works too; it loads fastai only then"
    from importlib import import_module,util
    if name=='__all__': return import_module(f'{__name__}.all').__all__
    if not name.startswith('_') and not util.find_spec(f'{__name__}.{name}'):
        module = import_module(f'{__name__}.all')
        if name in module.__all__: return getattr(module, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
