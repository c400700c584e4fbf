"Recipes of the pages, as a reader copies them, and batch norm that keeps its statistics"
from torchvision.models.resnet import BasicBlock,ResNet
from harness import *
from kinds import Odd
from pasted import recipe
from fastai_accum.extras import *

# ---- a micro-batch that is left out

@each(left_out=[{0}, {1,2,9}, {4,5,6,7}], value=[math.nan,math.inf])
def test_a_loss_that_is_nan(left_out, value, capsys):
    "Inside of a window, at its end, and a whole window, which makes no step: as if the loader had never had it"
    x,y = features(76),classes(76)
    def has_loss(i): return i//8 not in left_out
    windows = [[*filter(has_loss, range(i, min(i+32, 76)))] for i in (0,32,64)]
    bad = x.clone()
    for i in left_out: bad[8*i] = value
    cbs = [AccumulateStep(4), recipe('howto/stable_training.ipynb', 'SkipNaN')()]
    a = make_learner(make_dls(76, 8, x=bad, shuffle=False), cbs=cbs, opt_func=SGD)
    a.dls.valid.dataset.x = x[:24]
    b = make_learner(DataLoaders(DataLoader([(x[w],y[w]) for w in windows if w], bs=None), a.dls.valid), opt_func=SGD)
    for l in (a,b): l.fit(2)
    for k in 'params','opt': close(snapshot(a)[k], snapshot(b)[k])
    assert capsys.readouterr().out.count('left out')==2*len(left_out)
    assert a.accumulate_step.counts.n_thrown==2*(76-sum(map(len, windows)))

# ---- without statistics of the batch

def image_learner(bs, cbs=None):
    "36 images, so that 4 × 4 has a tail"
    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1,1,1,1], num_classes=3).double()
    dls = make_dls(36, bs, x=features(36, 3*32*32).view(36,3,32,32))
    return make_learner(dls, model, opt_func=SGD, lr=1e-2, cbs=cbs, splitter=trainable_params)

def test_groups_of_group_norm():
    change = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')
    for channels,groups in (512,32),(64,8),(48,6),(20,2),(13,1):
        assert change(nn.Sequential(nn.BatchNorm2d(channels)))[0].num_groups==groups

def test_batch_norm_eval():
    "Training is exact, statistics stay, gains and biases train. After the callback is removed, batch norm is as before"
    a,b = image_learner(4, [AccumulateStep(4),BatchNormEval()]),image_learner(16, BatchNormEval())
    for o in (a,b): o.model.bn1.running_mean.fill_(.1)
    old,gain = [o.clone() for o in a.model.buffers()],a.model.bn1.weight.detach().clone()
    for l in a,b: l.freeze(); l.fit(1); l.unfreeze(); l.fit(1)
    assert_same(a, b)
    assert rel(list(a.model.buffers()), old)[0]==0 and (a.model.bn1.weight-gain).norm()>1e-6
    a.remove_cb(BatchNormEval)
    a.fit(1)
    assert rel(a.model.bn1.running_mean, old[0])[0]>1e-3

# ---- the note on batch norm

def normed(*cbs, limit=99):
    "A learner whose model takes at most `limit` samples"
    def f(m, x):
        if len(x)>limit: raise RuntimeError('out of memory')
        return m.body(x)
    model = Odd(f, body=nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3))).double()
    return make_learner(make_dls(24, 4), model, cbs=cbs, splitter=params)

@pytest.mark.parametrize('cbs,sees,line', [
    ([MicroBatch(2)], 'MicroBatch(bs=2): batch norm sees 2 samples',
     'in place of MicroBatch, write\n     learn.gradient_checkpointing()\n'
     '  -> if that does not fit, write in its place\n     learn.micro_batch(2, exact=True)\n  -> or do nothing'),
    ([MicroBatch(2, coupled=True)], 'sees 2 samples', 'write in its place\n     learn.micro_batch(2, exact=True)'),
    ([AccumulateStep(3)], 'AccumulateStep(n_step=3): batch norm sees 4 samples',
     'load batches of 12 in place of AccumulateStep, and write\n     learn.gradient_checkpointing()'),
    ([AccumulateStep(n_samples=8)], 'sees 4 samples', 'load batches of 8 in'),
    ([AccumulateStep(lambda pct: 3)], 'sees 4 samples', 'load the large batch in'),
    ([AccumulateStep(3),MicroBatch(2)], 'sees 2 samples', 'of 12 in place of AccumulateStep and MicroBatch,'),
    ([AccumulateStep(3),MicroBatch(2, exact=True)], 'sees 4 samples',
     'load batches of 12 in place of AccumulateStep\n')], ids=str)
def test_the_note_comes_once_and_names_the_line(cbs, sees, line, capsys):
    learn = normed(*cbs)
    learn.lr_find(num_it=2, show_plot=False, suggest_funcs=None)
    assert 'batch norm sees' not in capsys.readouterr().out
    for _ in range(2): learn.fit(1)
    said = capsys.readouterr().out
    assert said.count('batch norm sees')==1 and sees in said and line in said, said

@each(case=[(9,'auto'), (9,4), (3,'auto')])
def test_the_note_comes_when_a_batch_is_cut(case, capsys):
    "`MicroBatch()` cuts nothing until memory runs out, and large slices cut nothing"
    limit,bs = case
    normed(MicroBatch(bs), limit=limit).fit(1)
    out = capsys.readouterr().out
    assert ('batch norm sees 2 samples' in out and 'learn.micro_batch(exact=True)' in out)==(limit==3), out

@each(cbs=[[], [AccumulateStep(1)], [AccumulateStep(n_samples=4)], [AccumulateStep(n_samples=1)],
           [AccumulateStep(2),BatchNormEval()], [MicroBatch(2, exact=True)]])
@pytest.mark.filterwarnings('ignore:.*1 samples are fewer')
def test_no_note(cbs, capsys):
    normed(*cbs).fit(1)
    make_learner(make_dls(24, 4), cbs=AccumulateStep(2)).fit(1)   # without batch norm
    with pytest.raises(ValueError, match='would never step'): normed(AccumulateStep(50, drop_last=True)).fit(1)
    assert 'batch norm' not in capsys.readouterr().out
