//! The process of a worker: pushes without end, writes down each, and looks at what it pulls.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use pushpull::blocking::Worker;
use pushpull::{Params, Push, TaskId, Token, WorkerConfig, f16};

use crate::history::{Entry, History, Log};
use crate::ledger::Verdict;
use crate::setting::{
    CACHE, CHUNK, SHARDS, Setting, TABLE, WIDTH, dense, id, ledger, row, rows, table,
};

/// The first argument of a worker's process.
pub(crate) const ROLE: &str = "--chaos-worker";

/// The arguments of a worker's process.
pub(crate) fn arguments(setting: &Setting, worker: u32) -> Vec<OsString> {
    let hosts = setting.hosts.join(",");
    let mode = setting.synchronous.to_string();
    let numbers = [worker.to_string(), setting.chunks.to_string(), mode, hosts];
    let mut arguments = vec![OsString::from(ROLE)];
    arguments.extend(numbers.map(OsString::from));
    arguments.push(setting.folder.clone().into());
    arguments
}

/// One push in so many looks at the values first. What is tested is pushes, so a kill should find
/// one under way and not a worker that pulls.
const PULL_EVERY: u64 = 4;

/// The gradient of a row.
const ONE_ROW: [f32; WIDTH as usize] = [-1.0; WIDTH as usize];

/// Trains until the stop file is there.
pub(crate) fn run(arguments: &[String]) -> ExitCode {
    // A test that is itself killed leaves no workers behind.
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).expect("the system knows this");
    let [worker, chunks, synchronous, hosts, folder] = arguments else {
        eprintln!("a worker has five arguments, not {arguments:?}");
        return ExitCode::from(2);
    };
    let hosts = hosts.split(',').map(str::to_owned).collect();
    let chunks = chunks.parse().expect("a number of chunks");
    let synchronous = synchronous == "true";
    let setting = Setting { hosts, chunks, synchronous, folder: PathBuf::from(folder) };
    let worker = worker.parse().expect("the index of a worker");
    let mut log = Log::open(&setting.history(worker)).expect("a history can be written");
    match Training::new(&setting, worker, &mut log).and_then(|mut training| training.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.fault(&format!("failed: {error}")).expect("a history can be written");
            ExitCode::FAILURE
        }
    }
}

/// A worker that has joined.
struct Training<'a> {
    setting: &'a Setting,
    worker: u32,
    session: Worker,
    params: Params,
    log: &'a mut Log,
    history: History,
    /// How many pushes each shard had applied at the last pull.
    seen: [f32; SHARDS],
}

impl<'a> Training<'a> {
    fn new(setting: &'a Setting, worker: u32, log: &'a mut Log) -> Result<Self, Box<dyn Error>> {
        log.start()?;
        let mut history = History::of(setting.history(worker), setting.ledger_elements());
        history.catch_up();
        let config = WorkerConfig::new(setting.cluster(), TaskId::worker(worker));
        let mut session = Worker::connect(config)?;
        let params = session.join(&setting.variables(), |_| ())?;
        check_places(setting, &session)?;
        let seen = [0.0; SHARDS];
        Ok(Training { setting, worker, session, params, log, history, seen })
    }

    fn run(&mut self) -> Result<(), Box<dyn Error>> {
        while self.goes_on()? {
            let push = self.history.next();
            let Some(token) = self.session.token()? else {
                return match self.setting.synchronous {
                    true => Ok(()),
                    false => Err("there are no tokens any more".into()),
                };
            };
            if push.is_multiple_of(PULL_EVERY) {
                if self.session.pull(&token, &mut self.params)?.is_stale() {
                    continue;
                }
                self.look(push)?;
            }
            // Both ways of pushing take their turn.
            let pushed = match push % 5 {
                0 => self.push_in_pieces(token, push)?,
                _ => self.push(token, push)?,
            };
            match (pushed, self.setting.synchronous) {
                (Push::Applied { .. }, false) | (Push::Accepted { .. }, true) => {
                    self.log.acknowledged(push)?;
                    self.history.acknowledge(push);
                }
                (Push::Stale { .. }, true) => {
                    self.log.stale(push)?;
                    self.history.forget(push);
                }
                (other, _) => return Err(format!("push {push} came to {other:?}").into()),
            }
        }
        Ok(())
    }

    /// Workers stop one by one, unless a step needs several of them: then the chief ends it for all.
    fn goes_on(&mut self) -> Result<bool, Box<dyn Error>> {
        let stop = self.setting.stop_file().exists();
        if stop && self.setting.synchronous {
            if self.worker == 0 {
                self.session.finish()?;
            }
            return Ok(true);
        }
        Ok(!stop)
    }

    /// Every push adds one to all elements of the dense variables, one at its own place in the
    /// ledger, and one to its rows: the learning rate is one, so the gradients are minus that.
    fn push(&mut self, token: Token, push: u64) -> Result<Push, Box<dyn Error>> {
        let (chunk, element) = self.setting.entry(push);
        let mut gradients = self.session.gradients();
        for shard in 0..SHARDS {
            gradients.view_mut::<f32>(&dense(shard))?.fill(-1.0);
            let name = ledger(self.worker, chunk, shard);
            match self.setting.has_halves() {
                true => enter(gradients.view_mut(&name)?, element, f16::ZERO, f16::NEG_ONE),
                false => enter(gradients.view_mut(&name)?, element, 0.0_f32, -1.0),
            }
            gradients.set_rows(&rows(self.worker, shard), &[row(push)], &ONE_ROW)?;
            for kind in [TABLE, CACHE] {
                let ids = [id(push % self.setting.ledger_elements())];
                gradients.set_rows(&table(kind, self.worker, shard), &ids, &ONE_ROW)?;
            }
        }
        self.log.invoke(push)?;
        self.history.invoke(push);
        Ok(self.session.push(token, gradients)?)
    }

    fn push_in_pieces(&mut self, token: Token, push: u64) -> Result<Push, Box<dyn Error>> {
        let (chunk, element) = self.setting.entry(push);
        let ones = vec![-1.0_f32; self.params.view::<f32>(&dense(0))?.len()];
        let (mut entries, mut halves) = ([0.0_f32; CHUNK as usize], [f16::ZERO; CHUNK as usize]);
        (entries[element], halves[element]) = (-1.0, f16::NEG_ONE);
        self.log.invoke(push)?;
        self.history.invoke(push);
        let mut pushing = self.session.begin(token)?;
        for shard in 0..SHARDS {
            let name = ledger(self.worker, chunk, shard);
            match self.setting.has_halves() {
                true => pushing.variable(&name, &halves)?,
                false => pushing.variable(&name, &entries)?,
            }
            pushing.variable(&dense(shard), &ones)?;
            pushing.rows(&rows(self.worker, shard), &[row(push)], &ONE_ROW)?;
            for kind in [TABLE, CACHE] {
                let ids = [id(push % self.setting.ledger_elements())];
                pushing.rows(&table(kind, self.worker, shard), &ids, &ONE_ROW)?;
            }
        }
        Ok(pushing.finish()?)
    }

    /// What was pulled is of one version on each shard, not older than what was pulled before, and
    /// has what this worker was last told is there.
    fn look(&mut self, push: u64) -> Result<(), Box<dyn Error>> {
        let mut verdict = Verdict::default();
        let (chunk, element) = self.setting.entry(push.saturating_sub(1));
        let last = match push {
            0 => Entry::default(),
            push => {
                let elements = self.setting.ledger_elements();
                self.history.entries[((push - 1) % elements) as usize]
            }
        };
        for shard in 0..SHARDS {
            let name = dense(shard);
            let pushes = verdict.uniform(self.params.view(&name)?, &name);
            if pushes < self.seen[shard] {
                let seen = self.seen[shard];
                verdict.lost += 1;
                verdict.names.push(format!("{name} has gone back from {seen} to {pushes}"));
            }
            self.seen[shard] = pushes;
            let name = ledger(self.worker, chunk, shard);
            let value = self.setting.entries(&self.params, &name)?[element];
            verdict.element(value, last, || format!("{name}[{element}]"));
        }
        match verdict.is_clean() {
            true => Ok(()),
            false => Err(format!("a pull before push {push} shows {verdict:?}").into()),
        }
    }
}

/// A gradient of one at one place. The memory is that of earlier pushes.
fn enter<T: Copy>(gradient: &mut [T], element: usize, zero: T, one: T) {
    gradient.fill(zero);
    gradient[element] = one;
}

/// The variables must lie where their names say, or the judge would compare apples and pears.
fn check_places(setting: &Setting, session: &Worker) -> Result<(), Box<dyn Error>> {
    let placement = session.placement().ok_or("a worker that has joined has a placement")?;
    for (index, variable) in setting.variables().iter().enumerate() {
        let shard = setting.shard(index % SHARDS);
        let placed = placement.of_variable(pushpull::VariableId(index as u32));
        if !matches!(placed, [partition] if partition.shard == shard) {
            return Err(format!("{} is not on {shard}: {placed:?}", variable.name()).into());
        }
    }
    Ok(())
}
