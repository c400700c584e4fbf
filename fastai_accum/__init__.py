"Gradient accumulation that trains as the batch that did not fit: `from fastai_accum.all import *`"
__version__ = "0.3.0"

def __getattr__(name):
    "`from fastai_accum import AccumulateStep` works too; it loads fastai only then"
    from importlib import import_module,util
    if not name.startswith('_') and not util.find_spec(f'{__name__}.{name}'):
        module = import_module(f'{__name__}.all')
        if name in module.__all__: return getattr(module, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
