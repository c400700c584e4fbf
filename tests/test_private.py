"""The private names of PyTorch and fastai that the package uses: each test fails by name when one is gone or means
something else. `nbs/private.ipynb` has the reason for each."""
import ast
from pathlib import Path
import fastai_accum
from harness import *
from fastai_accum.private import (
    SyncBatchNormFunction,TorchDispatchMode,attention,change_hidden,compiled_in_place,default_arguments,dispatch_modes,
    function_modes,grad_hook_dicts,has_hidden,hook_dicts,in_vmap,is_compiled,mps_generator,no_modes,own_backward,
    push_modes,train_metrics,uncompiled,with_events)
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
    m,n = nn.Linear(2, 2),[]
    m.register_forward_pre_hook(lambda *o: n.append(0))
    m.register_forward_hook(lambda *o: n.append(1))
    m.register_full_backward_pre_hook(lambda *o: n.append(2))
    m.register_full_backward_hook(lambda *o: n.append(3))
    forward,pre,backward,backward_pre = hook_dicts(m)
    assert [len(o) for o in hook_dicts(m)]==[1]*4
    for hs in hook_dicts(m): hs.clear()
    m(torch.ones(1, 2)).sum().backward()
    assert n==[]

def test_grad_hook_dicts():
    p,n = nn.Parameter(torch.ones(2)),[]
    p.register_hook(lambda g: n.append(0))
    p.register_post_accumulate_grad_hook(lambda p: n.append(1))
    for hs in grad_hook_dicts(p): hs.clear()
    p.sum().backward()
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

def test_modes_of_a_thread():
    from threading import Thread
    ops,calls = Ops(),Calls()
    def run(modes):
        push_modes(*modes)
        torch.ones(2).add(1)
    with ops,calls: modes = function_modes(),dispatch_modes()
    t = Thread(target=run, args=[modes])
    t.start(); t.join()
    assert ops.n>0 and torch.Tensor.add in calls.seen
    n = ops.n
    torch.ones(2)
    assert ops.n==n   # the modes have gone with the thread

def test_no_modes():
    ops,calls = Ops(),Calls()
    with ops,calls:
        with no_modes(): torch.ones(2).add(1)
    assert ops.n==0 and calls.seen==[]

def test_in_vmap():
    seen = []
    torch.vmap(lambda x: seen.append(in_vmap()) or x)(torch.zeros(2))
    assert seen==[True] and not in_vmap()

def test_default_arguments():
    assert default_arguments(torch.ops.aten.native_dropout.default).keys()=={'input','p','train'}
    assert default_arguments(torch.ops.aten.uniform_.default)['to']==1

def test_attention():
    "The slow path of attention, whose dropout can be seen; the same function otherwise"
    torch.manual_seed(0)
    m,x = nn.MultiheadAttention(4, 2, batch_first=True).eval(),torch.randn(2, 3, 4)
    plain,_ = m(x, x, x)
    calls = Calls()
    qkv = [o.transpose(0,1) for o in (x,x,x)]
    with calls: out,_ = attention(*qkv, 4, 2, m.in_proj_weight, m.in_proj_bias, None, None,
                                  False, 0., m.out_proj.weight, m.out_proj.bias, training=False)
    assert F.linear in calls.seen and F.multi_head_attention_forward not in calls.seen
    assert torch.allclose(out.transpose(0,1), plain, atol=1e-6)

def test_sync_batch_norm_function():
    import inspect
    names = 'self input weight bias running_mean running_var eps momentum process_group world_size'.split()
    assert list(inspect.signature(SyncBatchNormFunction.forward).parameters)==names

def test_fastai():
    learn = make_learner(make_dls(16, 8), metrics=Losses())
    learn.recorder.train_metrics = True
    assert [type(o) for o in train_metrics(learn.recorder)]==[Losses]
    learn.recorder.train_metrics = False
    assert train_metrics(learn.recorder)==[]
    seen = []
    def note(f, event_type, ex, final=noop):
        seen.append(event_type)
        return Learner._with_events(learn, f, event_type, ex, final)
    vars(learn)[with_events] = note
    learn.fit(1)
    assert seen[:7]==['fit','epoch','train','batch','backward','step','batch']
    assert own_backward in vars(Learner)

def test_hidden_states():
    from fastai.text.models.awdlstm import AWD_LSTM
    m = AWD_LSTM(10, 4, 5, 2)
    m.reset()
    assert has_hidden(m) and not has_hidden(nn.Linear(2, 2))
    change_hidden(m, 3)
    assert m.hidden[0][0].shape[1]==3

ours = Path(fastai_accum.__file__).parent
modules = sorted(o for o in ours.rglob('*.py') if o.name not in ('_modidx.py','private.py'))

def private_names(f):
    "The private names that a module takes from PyTorch, fastai or Python"
    for o in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
        if isinstance(o, ast.ImportFrom) and not o.level:
            names = [*o.module.split('.'), *(a.name for a in o.names)]
            if any(k.startswith('_') for k in names): yield f'from {o.module}'
        is_own = isinstance(o, ast.Attribute) and getattr(o.value, 'id', '') in ('self','cls','o')
        if isinstance(o, ast.Attribute) and o.attr.startswith('_') and not o.attr.endswith('__') and not is_own:
            if not isinstance(o.value, ast.Name) or o.value.id not in own_classes(f): yield f'{ast.unparse(o)}'

def own_classes(f):
    return {o.name for o in ast.walk(ast.parse(f.read_text(encoding='utf-8'))) if isinstance(o, ast.ClassDef)}

def test_private_names_stand_in_one_module():
    found = {o.stem:list(private_names(o)) for o in modules}
    assert len(found)>30 and not any(found.values()), {k:v for k,v in found.items() if v}
