"`turn_on_accumulation`: the whole product of ways to train, reloaded modules, wrappers of others, memory, threads"
import gc,itertools,os,pytest,subprocess,sys,weakref,zipfile
from functools import wraps
from harness import *
from fastai_accum.patch import *
from test_patch import check,fits,settings,some,steps,turned_off

@pytest.mark.parametrize('fit,how,existing',
                         [o for o in itertools.product(fits, settings, [True,False]) if o not in some])
def test_all_fits(fit, how, existing, tmp_path): check(fit, how, existing, tmp_path)

def test_reload():
    "After the module is loaded again, what was turned on stays on, and it can be turned off"
    code = """
import importlib
from harness import *
import fastai_accum.patch as patch
def steps(): learn = make_learner(make_dls(96, 8)); learn.fit(1); return len(learn.spy.steps)
patch.turn_on_accumulation(4)
patch = importlib.reload(patch)
assert steps()==3 and not hasattr(Learner.fit.__wrapped__, '__wrapped__')
patch.turn_off_accumulation()
assert steps()==12"""
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join(sys.path)}
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=env, capture_output=True, text=True)
    assert not res.returncode, res.stderr

def test_wrapped_by_others():
    "Another library wraps `Learner.fit` on top: its wrapper stays, and ours does nothing any more"
    fit = Learner.fit
    turn_on_accumulation(4)
    ours,calls = Learner.fit,[]
    @wraps(ours)
    def other(self, *args, **kwargs): calls.append(1); return ours(self, *args, **kwargs)
    Learner.fit = other
    try:
        learn = make_learner(make_dls(96, 8))
        assert steps(learn)==3
        turn_off_accumulation()
        assert Learner.fit is other and steps(learn)==12
        turn_on_accumulation(2)
        assert steps(learn)==6 and len(calls)==3
        turn_off_accumulation()
        assert Learner.fit is other
    finally: Learner.fit = fit

def test_learners_are_freed():
    with accumulation(4):
        learn = make_learner(make_dls(96, 8)); learn.fit(1)
        ref = weakref.ref(learn)
        del learn; gc.collect()
    assert ref() is None

def test_exported_while_on(tmp_path):
    "Nothing of the library is in the file: it loads where fastai_accum is not installed"
    learn = make_learner(make_dls(96, 8), splitter=trainable_params, path=tmp_path)
    learn.remove_cb(Spy); learn.logger = print
    with accumulation(4): learn.fit(1); learn.recorder.smooth_loss = AvgSmoothLoss(); learn.export('a.pkl')
    names = zipfile.ZipFile(tmp_path/'a.pkl')
    assert not any(b'fastai_accum' in names.read(o) for o in names.namelist())
