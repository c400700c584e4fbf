"Recipes of the pages, as a reader copies them, and batch norm that keeps its statistics"
import json
import pytest
from harness import *
import fastai_accum.all   # for `exact=True`

nbs = Path(__file__).resolve().parent.parent/'nbs'

def recipe(page, name, upto='\n\n'):
    "What the page `page` defines as `name`"
    cells = [''.join(o['source']) for o in json.loads((nbs/page).read_text(encoding='utf-8'))['cells']]
    start = re.compile(rf'^(class|def) {name}\b', re.M)
    s, = [c[m.start():].split(upto)[0] for c in cells if (m := start.search(c))]
    exec(s, env := dict(globals()))
    return env[name]

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
