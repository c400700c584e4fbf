"""Group norm in place of batch norm, and running statistics that count steps: every kind of batch norm, in models as
people have them"""
import pickle
from copy import deepcopy
import pytest
import fastcore.test as fct
from torchvision.models.resnet import BasicBlock,ResNet
from harness import *
import fastai_accum.all   # for `exact=True`
from fastai_accum.extras.batchnorm import *
from fastai_accum.microbatch import *
from fastai_accum.patch import accumulation

kinds = {nn.BatchNorm1d:(4,16), nn.BatchNorm2d:(4,16,3,5), nn.BatchNorm3d:(4,16,2,3,2), nn.SyncBatchNorm:(4,16,3,5)}
def norms(model, cls): return [m for m in model.modules() if isinstance(m, cls)]
bns = nn.BatchNorm1d,nn.BatchNorm2d,nn.BatchNorm3d,nn.SyncBatchNorm

@pytest.mark.parametrize('affine', [True,False])
@pytest.mark.parametrize('cls', kinds)
def test_every_batch_norm(cls, affine):
    bn = cls(16, eps=1e-3, affine=affine).double()
    if affine: nn.init.uniform_(bn.weight); nn.init.uniform_(bn.bias)
    x = torch.randn(*kinds[cls]).double()
    gn = to_group_norm(nn.Sequential(bn))[0]
    by_hand = torch.stack([((o-o.mean())/(o.var(unbiased=False)+1e-3).sqrt()) for s in x
                           for o in s.chunk(2)]).reshape(x.shape)   # two groups of 8
    if affine: by_hand = by_hand*bn.weight.reshape(-1,*[1]*(x.ndim-2))+bn.bias.reshape(-1,*[1]*(x.ndim-2))
    assert rel(gn(x), by_hand)[0]<=TOL
    assert rel(gn.eval()(x), by_hand)[0]<=TOL
    assert gn.weight is bn.weight and gn.bias is bn.bias

def test_conversion_keeps():
    "The dtype, frozen parameters, the mode and shared layers stay as they were"
    shared = nn.BatchNorm2d(8).half()
    shared.bias.requires_grad_(False)
    model = nn.ModuleDict(dict(a=shared, b=nn.Sequential(shared, nn.BatchNorm2d(24).eval())))
    assert to_group_norm(model) is model
    gn = model['a']
    assert type(gn) is nn.GroupNorm and model['b'][0] is gn and gn.training
    assert gn.weight.dtype==torch.half and not gn.bias.requires_grad
    assert not model['b'][1].training and model['b'][1].num_groups==3
    assert rel(pickle.loads(pickle.dumps(deepcopy(model))).state_dict(), model.state_dict())[0]==0
    assert type(to_group_norm(nn.BatchNorm2d(8))) is nn.GroupNorm

@pytest.mark.parametrize('channels,groups,expected', [(512,32,32), (64,32,8), (64,4,4), (100,32,10), (20,32,2),
                                                      (13,32,1), (2,32,1), (17,1,1)])
def test_groups(channels, groups, expected): assert to_group_norm(nn.BatchNorm2d(channels), groups).num_groups==expected

def image_learner(bs, cbs=None, change=to_group_norm):
    torch.manual_seed(0)
    x = torch.randn(36,3,32,32, generator=torch.Generator().manual_seed(0)).double()
    model = change(ResNet(BasicBlock, [1,1,1,1], num_classes=3).double())
    return make_learner(make_dls(36, bs, x=x, y=classes(36)), model, opt_func=SGD, lr=1e-2, cbs=cbs,
                        splitter=trainable_params)

def test_resnet_is_exact():
    "With a tail: 36 images are two windows of 16 and one of 4"
    a,b = image_learner(4, AccumulateStep(4)),image_learner(16)
    assert not norms(a.model, bns) and len(norms(a.model, nn.GroupNorm))==12
    for l in a,b: l.fit(1)
    assert_same(a, b)
    a,b = image_learner(4, AccumulateStep(4), noop),image_learner(16, None, noop)
    for l in a,b: l.fit(1)
    assert worst(a, b, but='buffers')[0]>1e-3, 'batch norm did not differ, so nothing was compared'

def test_optimizer_goes_on():
    "Converted between two fits: the optimizer has the same parameters"
    model = nn.Sequential(nn.Linear(6,16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16,3)).double()
    learn = make_learner(make_dls(64, 16), model, opt_func=SGD, splitter=trainable_params)
    learn.fit(1)
    to_group_norm(learn.model)
    gain,old = learn.model[1].weight,learn.model[1].weight.detach().clone()
    learn.fit(1)
    assert type(learn.model[1]) is nn.GroupNorm and learn.model[1].weight is gain and (gain-old).norm()>1e-6

def test_refused_before_anything_changes():
    timm = pytest.importorskip('timm', reason='tests the batch norm of timm, which is in the extra "integrations"')
    model = nn.Sequential(nn.BatchNorm2d(8), timm.layers.BatchNormAct2d(8))
    with fct.expect_fail(ValueError, "the BatchNormAct2d '1' with 8 features"): to_group_norm(model)
    assert type(model[0]) is nn.BatchNorm2d
    bad = {nn.LazyBatchNorm2d():'with 0 features cannot be replaced: its class',
           nn.BatchNorm1d(7):'fewer than 8 would lose',
           torch.jit.script(nn.BatchNorm2d(8)):'before you script'}
    for last,why in bad.items():
        with fct.expect_fail(ValueError, why): to_group_norm(nn.Sequential(model[0], last))
    assert type(model[0]) is nn.BatchNorm2d
    lazy = nn.Sequential(nn.LazyBatchNorm2d())
    lazy(torch.randn(2,8,3,3))
    assert type(to_group_norm(lazy)[0]) is nn.GroupNorm

def fine_tune(learn):
    learn.freeze(); learn.fit(1)
    learn.unfreeze(); learn.fit(1)

def test_batch_norm_eval():
    "Training is exact, statistics stay, gains and biases train. After the callback is removed, batch norm is as before"
    pretrained = image_learner(16, None, noop); pretrained.fit(1)
    def learner(bs, cbs):
        learn = image_learner(bs, cbs, noop); learn.model.load_state_dict(pretrained.model.state_dict()); return learn
    a,b = learner(4, [AccumulateStep(4),BatchNormEval()]),learner(16, [BatchNormEval()])
    old,gain = [o.clone() for o in a.model.buffers()],a.model.bn1.weight.detach().clone()
    for l in a,b: fine_tune(l)
    assert_same(a, b)
    assert rel(list(a.model.buffers()), old)[0]==0 and (a.model.bn1.weight-gain).norm()>1e-6
    a.remove_cb(BatchNormEval)
    a.fit(1)
    assert rel(a.model.bn1.running_mean, old[0])[0]>1e-3

# ---- the note

@pytest.fixture
def notes(capsys):
    "The notes on batch norm that a new learner prints in `n` fits"
    def f(cbs=None, model=None, n=1):
        m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double() if model is None else model()
        learn = make_learner(make_dls(24, 4), m, cbs=cbs and cbs(), splitter=params)
        for _ in range(n): learn.fit(1)
        return [o for o in capsys.readouterr().out.splitlines() if 'batch norm sees' in o]
    return f

def test_the_note_comes_once_a_learner(notes):
    for cbs in (lambda: AccumulateStep(2)),(lambda: MicroBatch(2)),(lambda: MicroBatch(2, coupled=True)):
        assert len(notes(cbs, n=3))==1

class Marks(Callback):
    "Prints where the progress bar would begin"
    order = ProgressCallback.order
    def before_fit(self): print('the bar begins')

class MyMicro(MicroBatch): pass

@pytest.mark.parametrize('cbs,sees,line', [
    (lambda: MyMicro(2), 'MyMicro: batch norm sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: MicroBatch(2), 'MicroBatch: batch norm sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: MicroBatch(2, coupled=True), 'sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: AccumulateStep(3), 'AccumulateStep: batch norm sees 4 samples',
     'load batches of 12 and write\nlearn.remove_cb(AccumulateStep).micro_batch(4, exact=True)'),
    (lambda: AccumulateStep(n_samples=8), 'sees 4 samples', 'load batches of 8 '),
    (lambda: [AccumulateStep(3),MicroBatch(2)], 'sees 2 samples', 'load batches of 12 '),
    (lambda: [AccumulateStep(3),MicroBatch(2, exact=True)], 'sees 4 samples',
     'load batches of 12 and write\nlearn.remove_cb(AccumulateStep).micro_batch(2, exact=True)')])
def test_the_note_names_the_line_above_the_bar(cbs, sees, line, capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    make_learner(make_dls(24, 4), model, cbs=[*L(cbs()), Marks()], splitter=params).fit(1)
    said,_ = capsys.readouterr().out.split('the bar begins')
    assert sees in said and line in said, said

def test_the_note_names_what_turns_accumulation_off(capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    with accumulation(3): make_learner(make_dls(24, 4), model, splitter=params).fit(1)
    assert 'write\nturn_off_accumulation(); learn.micro_batch(4, exact=True)' in capsys.readouterr().out

def test_the_note_comes_when_a_batch_is_cut(capsys):
    "`MicroBatch()` cuts nothing until memory runs out, and large slices cut nothing"
    class Small(nn.Sequential):
        def forward(self, x):
            if len(x)>limit: raise RuntimeError('out of memory')
            return super().forward(x)
    for limit,cb in (9,MicroBatch()),(9,MicroBatch(4)),(3,MicroBatch()):
        model = Small(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
        make_learner(make_dls(24, 4), model, cbs=cb, splitter=params).fit(1)
        out = capsys.readouterr().out
        assert ('batch norm sees 2 samples' in out and 'learn.micro_batch(exact=True)' in out)==(limit==3), out

def test_no_note_before_an_error(capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    learn = make_learner(make_dls(24, 4), model, cbs=AccumulateStep(50, drop_last=True), splitter=params)
    with pytest.raises(ValueError, match='would never step'): learn.fit(1)
    assert 'batch norm' not in capsys.readouterr().out

def test_the_note_does_not_come(notes):
    for cbs in (None, lambda: AccumulateStep(1), lambda: [AccumulateStep(2),BatchNormEval()]): assert not notes(cbs)
    assert not notes(lambda: AccumulateStep(2), small_model)

def test_the_note_does_not_come_with_exact(notes): assert not notes(lambda: MicroBatch(2, exact=True))
