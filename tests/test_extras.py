"Recipes of the pages, as a reader copies them, and batch norm that keeps its statistics"
import pytest
from torchvision.models.resnet import BasicBlock,ResNet
from harness import *
from pasted import recipe
from fastai_accum.extras.batchnorm import *

# ---- a micro-batch that is left out

N,BS = 76,8
def micro(i): return range(i*BS, min(i*BS+BS, N))

def without(left_out, **kwargs):
    "A learner with the large batch, whose loader has never had the micro-batches `left_out`"
    windows = [[j for i in range(k, min(k+4,10)) if i not in left_out for j in micro(i)] for k in range(0, 10, 4)]
    x,y = features(N),classes(N)
    learn = make_learner(make_dls(N, 32), **kwargs)
    learn.dls = DataLoaders(DataLoader([(x[w],y[w]) for w in windows if w], bs=None), learn.dls.valid)
    return learn

@pytest.mark.parametrize('value', [math.nan,math.inf], ids=str)
@pytest.mark.parametrize('left_out', [{0}, {1,2,9}, {4,5,6,7}], ids=str)
def test_a_loss_that_is_nan(left_out, value, capsys):
    "Inside of a window, at its end, and a whole window, which makes no step"
    x = features(N).clone()
    for i in left_out: x[micro(i)[0]] = value
    a = make_learner(make_dls(N, BS, x=x, shuffle=False), cbs=[AccumulateStep(4), recipe('extras.ipynb', 'SkipNaN')()],
                     opt_func=SGD)
    a.dls.valid.dataset.x = features(24)
    b = without(left_out, opt_func=SGD)
    for l in (a,b): l.fit(2)
    for k in 'params','opt': close(snapshot(a)[k], snapshot(b)[k])
    assert capsys.readouterr().out.count('left out')==2*len(left_out)
    assert a.accumulate_step.counts.n_thrown==2*sum(len(micro(i)) for i in left_out)

# ---- without statistics of the batch

def image_learner(bs, cbs=None, change=noop):
    "36 images, so that 4 × 4 has a tail"
    torch.manual_seed(0)
    x = torch.randn(36,3,32,32, generator=torch.Generator().manual_seed(0)).double()
    model = change(ResNet(BasicBlock, [1,1,1,1], num_classes=3).double())
    return make_learner(make_dls(36, bs, x=x, y=classes(36)), model, opt_func=SGD, lr=1e-2, cbs=cbs,
                        splitter=trainable_params)

def test_group_norm_is_exact():
    change = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')
    a,b = image_learner(4, AccumulateStep(4), change),image_learner(16, None, change)
    found = [o for o in a.model.modules() if isinstance(o, (nn.GroupNorm,nn.BatchNorm2d))]
    assert len(found)==12 and all(isinstance(o, nn.GroupNorm) for o in found)
    for l in a,b: l.fit(1)
    assert_same(a, b)

@pytest.mark.parametrize('channels,groups', [(512,32), (64,8), (48,6), (20,2), (13,1), (7,1)])
def test_groups(channels, groups):
    model = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')(nn.Sequential(nn.BatchNorm2d(channels)))
    assert model[0].num_groups==groups

def test_batch_norm_eval():
    "Training is exact, statistics stay, gains and biases train. After the callback is removed, batch norm is as before"
    def fine_tune(learn): learn.freeze(); learn.fit(1); learn.unfreeze(); learn.fit(1)
    a,b = image_learner(4, [AccumulateStep(4),BatchNormEval()]),image_learner(16, BatchNormEval())
    for o in (a,b): o.model.bn1.running_mean.fill_(.1)
    old,gain = [o.clone() for o in a.model.buffers()],a.model.bn1.weight.detach().clone()
    for l in a,b: fine_tune(l)
    assert_same(a, b)
    assert rel(list(a.model.buffers()), old)[0]==0 and (a.model.bn1.weight-gain).norm()>1e-6
    a.remove_cb(BatchNormEval)
    a.fit(1)
    assert rel(a.model.bn1.running_mean, old[0])[0]>1e-3
