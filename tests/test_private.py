"""The private names of PyTorch and fastai that the package uses: each test, or a cell of `nbs/private.ipynb`, fails by
name when one is gone or means something else. The page has the reason for each."""
import ast,inspect,threading
from pathlib import Path
import fastai_accum
from harness import *
from fastai.text.models.awdlstm import AWD_LSTM
from fastai_accum.private import (
    SyncBatchNormFunction,TorchDispatchMode,attention,change_hidden,compiled_in_place,dispatch_modes,
    function_modes,grad_hook_dicts,hook_dicts,is_compiled,mps_generator,no_modes,own_backward,
    push_dispatch_mode,push_function_mode,uncompiled,with_events)
from torch.overrides import TorchFunctionMode

class Calls(TorchFunctionMode):
    def __init__(self): super().__init__(); self.seen = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

class Ops(TorchDispatchMode):
    def __init__(self): super().__init__(); self.n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))

def test_hook_dicts():
    m,p,n = nn.Linear(2, 2),nn.Parameter(torch.ones(2)),[]
    for o in (m.register_forward_pre_hook, m.register_forward_hook, m.register_full_backward_pre_hook,
              m.register_full_backward_hook, p.register_hook, p.register_post_accumulate_grad_hook):
        o(lambda *_: n.append(o))
    assert [len(o) for o in hook_dicts(m)]==[1]*4
    for hs in *hook_dicts(m),*grad_hook_dicts(p): hs.clear()
    (m(torch.ones(1, 2)).sum()+p.sum()).backward()
    assert n==[] and grad_hook_dicts(nn.Parameter(torch.ones(2)))[1] is None

def test_is_compiled():
    m,f = nn.Linear(2, 2),lambda x: x+1
    compiled = torch.compile(m, backend='eager')
    assert not is_compiled(m) and is_compiled(compiled) and uncompiled(compiled) is m and uncompiled(m) is m
    assert uncompiled(torch.compile(f, backend='eager')) is f and uncompiled(f) is f
    m.compile(backend='eager')
    assert is_compiled(m) and compiled_in_place(m)

@pytest.mark.skipif(not torch.backends.mps.is_available(), reason='Apple devices only')
def test_mps_generator(): assert isinstance(mps_generator(torch.mps), torch.Generator)

def test_modes():
    "They are handed to a thread, with which they go, and there may be none for a while"
    ops,calls = Ops(),Calls()
    with ops,calls:
        modes = function_modes(),dispatch_modes()
        with no_modes(): torch.ones(2).add(1)
    assert ops.n==0 and calls.seen==[]
    def run():
        for push,ms in zip((push_function_mode,push_dispatch_mode), modes):
            for m in ms: push(m)
        torch.ones(2).add(1)
    t = threading.Thread(target=run)
    t.start(); t.join()
    n = ops.n
    torch.ones(2)
    assert ops.n==n>0 and torch.Tensor.add in calls.seen

def test_attention():
    "The slow path of attention, whose dropout can be seen; the same function otherwise"
    m,x,calls = nn.MultiheadAttention(4, 2).eval(),torch.randn(2, 3, 4),Calls()
    with calls: out,_ = attention(x, x, x, 4, 2, m.in_proj_weight, m.in_proj_bias, None, None,
                                  False, 0., m.out_proj.weight, m.out_proj.bias, training=False)
    assert F.linear in calls.seen and F.multi_head_attention_forward not in calls.seen
    assert torch.allclose(out, m(x, x, x)[0], atol=1e-6)

def test_sync_batch_norm_function():
    names = 'self input weight bias running_mean running_var eps momentum process_group world_size'.split()
    assert list(inspect.signature(SyncBatchNormFunction.forward).parameters)==names

def test_fastai():
    learn,seen = make_learner(make_dls(16, 8)),[]
    def note(f, event_type, ex, final=noop):
        seen.append(event_type)
        return Learner._with_events(learn, f, event_type, ex, final)
    vars(learn)[with_events] = note
    learn.fit(1)
    assert seen[:7]==['fit','epoch','train','batch','backward','step','batch']
    assert own_backward in vars(Learner)

def test_hidden_states():
    m = AWD_LSTM(10, 4, 5, 2)
    m.reset()
    getattr(m, change_hidden)(3)
    assert m.hidden[0][0].shape[1]==3

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
