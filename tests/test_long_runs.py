"Six thousand micro-batches (`make sweep`: a hundred thousand): no memory that stays, and no work that grows"
import gc,os,sys
from harness import *

def rss():
    "Resident memory of this process in MiB"
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20

class Watch(EachMicro):
    "Memory each 500 micro-batches, and the calls of Python in the hundred before"
    order = Recorder.order-1
    def before_fit(self): self.n,self.mem,self.calls = 0,[],[]
    def count(self, frame, event, arg): self.calls[-1] += event=='call'
    def after_batch(self):
        if not self.training: return
        self.n += 1
        if self.n%500==400: self.calls.append(0); sys.setprofile(self.count)
        if self.n%500==0: sys.setprofile(None); self.mem.append(rss())
    def after_fit(self): sys.setprofile(None)

@pytest.mark.skipif(not Path('/proc/self/statm').exists(),
                    reason='reads the memory of the process from /proc, which only Linux has')
def test_soak():
    "Without `Recorder`, whose lists grow by one a step"
    watch,n_epoch = Watch(),100 if SWEEP else 6
    learn = make_learner(make_dls(1000*8-3, 8, skip=(5,77)), cbs=[watch,AccumulateStep(n_samples=30, drop_last=True)])
    learn.remove_cbs([Spy,Recorder])
    learn.fit(n_epoch)
    first,last = (sorted(o)[3] for o in (watch.calls[:6], watch.calls[-7:-1]))   # an epoch may end among them
    grown = watch.mem[-1]-watch.mem[0]
    print(f'{watch.n} micro-batches; {grown:+.2f} MiB from the first 500 to the end; calls × {last/first:.3f}')
    assert watch.n>=n_epoch*990 and grown<1 and last/first<1.05
    n = learn.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown
