"""Run notebooks as another processor would: `python benchmarks/rounding.py [path] [--seed 0]`

Processors add up in other orders, so their results differ in the last bit. Here each result of a sum, a product of matrices or
a function such as `exp` is moved by its last bit, up or down. All tolerances of the notebooks are a hundred times
smaller, so what passes has a margin of 100. What notebooks run in other processes stays as it is."""
import ast,re,sys,zlib
import torch
from execnb.shell import CaptureShell
from fastcore.all import *
from functools import partial
from nbdev import test as nbdev_test
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

bits = {torch.float32:torch.int32, torch.float64:torch.int64}
rounds = re.compile('mm|mv|dot|linear|conv|norm|sum|mean|var|std|softmax|loss|exp(?!and)|log|sigmoid|tanh|erf|gelu|silu|'
                    'sin|cos|pow|lstm|gru|rnn|avg_pool|attention|embedding_dense|upsample|dist|index_add|scatter_add')

count_memory = 'out_of_memory.ipynb','images.ipynb'   # pages that give a step so many bytes, and the errors take some, too
have_views = 'check.ipynb','callbacks.ipynb'      # their own `_backward` sets gradients of a class of fastai, which are views below any mode

class Rounding(TorchDispatchMode):
    "Results in floating point are off by their last bit; same bits, shape and seed, same error, as on a real processor"
    def __init__(self, seed=0): super().__init__(); self.seed = seed
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        inexact = rounds.search(func.name()) and not func._schema.is_mutable and not func.is_view
        return tree_map(self.moved, res) if inexact else res
    def moved(self, x):
        if type(x) is not torch.Tensor or x.dtype not in bits or x.device.type!='cpu': return x
        mixed = x.contiguous().view(bits[x.dtype])*2654435761 + zlib.crc32(f'{self.seed} {x.shape}'.encode())
        up = (mixed>>15&1)*2-1
        return torch.where(x==x.round(), x, x*(1+up*torch.finfo(x.dtype).eps))   # whole numbers are exact on each processor

class Strict(ast.NodeTransformer):
    "`assert a<1e-5`, `test_close(a, b, 1e-5)` and `np.allclose(a, b, rtol=1e-5)` with tolerances a hundred times smaller"
    def visit_Assert(self, node):
        for o in ast.walk(node.test):
            if isinstance(o, ast.Compare) and isinstance(o.ops[-1], (ast.Lt,ast.LtE)): self.smaller(o.comparators[-1])
        return self.generic_visit(node)
    def visit_Call(self, node):
        name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
        if name=='test_close':
            if len(node.args)==2: node.args.append(ast.Constant(1e-5))
            self.smaller(node.args[2])
        if name=='allclose':
            for o in node.keywords: self.smaller(o.value)
        ast.fix_missing_locations(node)
        return self.generic_visit(node)
    def smaller(self, o):
        if isinstance(o, ast.Constant) and isinstance(o.value, float) and o.value<=1e-3: o.value /= 100

class Shell(CaptureShell):
    seed = 0
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ast_transformers.append(Strict())
        self.user_ns['_rounding'] = Rounding(self.seed)
        self.run('_rounding.__enter__()')   # in the thread that runs the cells

def lesson(fn, seed, basepath):
    nbdev_test.CaptureShell,Shell.seed = Shell,seed
    own = sys.modules['__main__']
    try: return nbdev_test.test_nb(fn, basepath=basepath, do_print=True)[0]
    finally: sys.modules['__main__'] = own   # the notebook has set its own, where the next one would be looked for

@call_parse(pos=['path'])
def main(path:str=None, # A notebook or a folder
         seed:int=0,    # Other errors
         n_workers:int=2):
    "Run notebooks as another processor would, with tolerances that are a hundred times smaller"
    files = sorted(o.absolute() for o in nbdev_test.nbglob(path, as_path=True) if o.name not in (*count_memory,*have_views))
    passed = parallel(lesson, files, seed=seed, basepath=nbdev_test.get_config().config_path, n_workers=n_workers)
    failed = [o.name for o,ok in zip(files, passed) if not ok]
    if failed: raise SystemExit('failed: '+', '.join(failed))
