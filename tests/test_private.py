"""The private names of PyTorch and fastai that the package uses stand in one module, `fastai_accum.private`. Here are
those that no other test, and no cell of `nbs/private.ipynb`, would miss if they were gone or meant something else."""
import ast,inspect
from pathlib import Path
import fastai_accum
from harness import *
from fastai_accum.private import (SyncBatchNormFunction,TorchDispatchMode,grad_hook_dicts,hook_dicts,mps_generator,
                                  no_modes)
from torch.overrides import TorchFunctionMode

def test_hook_dicts():
    m,p,n = nn.Linear(2, 2),nn.Parameter(torch.ones(2)),[]
    for o in (m.register_forward_pre_hook, m.register_forward_hook, m.register_full_backward_pre_hook,
              m.register_full_backward_hook, p.register_hook, p.register_post_accumulate_grad_hook):
        o(lambda *_: n.append(o))
    assert [len(o) for o in hook_dicts(m)]==[1]*4
    for hs in *hook_dicts(m),*grad_hook_dicts(p): hs.clear()
    (m(torch.ones(1, 2)).sum()+p.sum()).backward()
    assert n==[] and grad_hook_dicts(nn.Parameter(torch.ones(2)))[1] is None

@pytest.mark.skipif(not torch.backends.mps.is_available(), reason='Apple devices only')
def test_mps_generator(): assert isinstance(mps_generator(torch.mps), torch.Generator)

def test_no_modes():
    seen = []
    def see(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))
    class Calls(TorchFunctionMode): __torch_function__ = see
    class Ops(TorchDispatchMode): __torch_dispatch__ = see
    with Ops(),Calls():
        with no_modes(): torch.ones(2).add(1)
        assert not seen
        torch.ones(2).add(1)
    assert torch.Tensor.add in seen and torch.ops.aten.add.Tensor in seen

def test_sync_batch_norm_function():
    names = 'self input weight bias running_mean running_var eps momentum process_group world_size'.split()
    assert list(inspect.signature(SyncBatchNormFunction.forward).parameters)==names

ours = Path(fastai_accum.__file__).parent
modules = sorted(o for o in ours.rglob('*.py') if o.name not in ('_modidx.py','private.py'))

def private_names(f):
    "The private names that a module takes from PyTorch, fastai or Python"
    nodes = list(ast.walk(ast.parse(f.read_text(encoding='utf-8'))))
    own = {'self','cls','o',*(o.name for o in nodes if isinstance(o, ast.ClassDef))}
    for o in nodes:
        if isinstance(o, ast.ImportFrom) and not o.level:
            names = [*o.module.split('.'), *(a.name for a in o.names)]
            if any(k.startswith('_') for k in names): yield f'from {o.module}'
        if isinstance(o, ast.Attribute) and o.attr.startswith('_') and not o.attr.endswith('__'):
            if getattr(o.value, 'id', '') not in own: yield ast.unparse(o)

def test_private_names_stand_in_one_module():
    found = {o.stem:list(private_names(o)) for o in modules}
    assert len(found)>25 and not any(found.values()), {k:v for k,v in found.items() if v}
