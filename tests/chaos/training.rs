//! The worker process: pushes until it is stopped, logs each push, and checks the values it pulls.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use pushpull::blocking::Worker;
use pushpull::protocol::Refusal;
use pushpull::variable::f16;
use pushpull::{Params, Push, Token};

use crate::history::{History, Log};
use crate::ledger::LedgerVerdict;
use crate::setting::{
    ADAM, CACHE, CHUNK, ChaosSetting, QUARTER, ROWS, SHARDS, TABLE, TOO_LONG, WIDTH, dense,
    heavy_rows, id, in_quarters, ledger, row, rows, sums, table,
};

/// The exit code of a worker whose run the step owner had ended: it is to be started again.
pub(crate) const RETIRED: i32 = 3;

/// The first argument of a worker's process.
pub(crate) const ROLE: &str = "--chaos-worker";

/// Returns the arguments of a worker process that reaches the servers at `hosts`.
pub(crate) fn arguments(setting: &ChaosSetting, worker: u32, hosts: &[String]) -> Vec<OsString> {
    let mode = setting.synchronous.to_string();
    let expires = setting.expires.to_string();
    let hosts = hosts.join(",");
    let numbers = [worker.to_string(), setting.chunks.to_string(), mode, expires, hosts];
    let mut arguments = vec![OsString::from(ROLE)];
    arguments.extend(numbers.map(OsString::from));
    arguments.push(setting.folder.clone().into());
    arguments
}

/// The worker pulls and checks the values before one push in this many. The test is about pushes,
/// so a kill should usually find a push in flight and not a pull.
const PULL_EVERY: u64 = 4;

/// One push in this many is computed for longer than the token timeout, if that is short.
const SLOW_EVERY: u64 = 61;

/// The gradient of a row.
const ONE_ROW: [f32; WIDTH as usize] = [-1.0; WIDTH as usize];

/// Trains until the stop file exists.
pub(crate) fn run(arguments: &[String]) -> ExitCode {
    // If the test itself is killed, its workers must end too.
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).expect("the system supports this");
    let [worker, chunks, synchronous, expires, hosts, folder] = arguments else {
        eprintln!("a worker needs six arguments, not {arguments:?}");
        return ExitCode::from(2);
    };
    let hosts = hosts.split(',').map(str::to_owned).collect();
    let chunks = chunks.parse().expect("a number of chunks");
    let synchronous = synchronous == "true";
    let expires = expires == "true";
    let setting =
        ChaosSetting { hosts, chunks, synchronous, expires, folder: PathBuf::from(folder) };
    let worker = worker.parse().expect("the index of a worker");
    let mut log = Log::open(&setting.history(worker)).expect("a history can be written");
    match JoinedTraining::new(&setting, worker, &mut log).and_then(|mut training| training.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if of_session(&*error).is_some_and(has_ended) => ExitCode::from(RETIRED as u8),
        Err(error) => {
            log.fault(&format!("failed: {error}")).expect("a history can be written");
            ExitCode::FAILURE
        }
    }
}

/// A worker that has joined.
struct JoinedTraining<'a> {
    setting: &'a ChaosSetting,
    worker: u32,
    session: Worker,
    params: Params,
    log: &'a mut Log,
    history: History,
    /// How many updates each shard had applied at the last pull.
    updates_seen: [f32; SHARDS],
}

impl<'a> JoinedTraining<'a> {
    fn new(
        setting: &'a ChaosSetting,
        worker: u32,
        log: &'a mut Log,
    ) -> Result<Self, Box<dyn Error>> {
        log.start()?;
        let mut history = History::of(setting.history(worker), setting.ledger_elements());
        history.catch_up();
        let config = setting.worker_config(worker);
        let mut session = Worker::connect(config)?;
        let params = session.join(&setting.variables(), |_| ())?;
        check_places(setting, &session)?;
        let updates_seen = [0.0; SHARDS];
        Ok(JoinedTraining { setting, worker, session, params, log, history, updates_seen })
    }

    fn run(&mut self) -> Result<(), Box<dyn Error>> {
        while self.continues()? {
            let push = self.history.next();
            let Some(token) = self.session.token()? else {
                return match self.setting.synchronous {
                    true => Ok(()),
                    false => Err("no tokens are left".into()),
                };
            };
            if push.is_multiple_of(PULL_EVERY) {
                if self.session.pull(&token, &mut self.params)?.is_stale() {
                    continue;
                }
                self.check_values(push)?;
            }
            if self.setting.expires && (push + 20 * u64::from(self.worker)) % SLOW_EVERY == 30 {
                // Stands for a long computation: the session still renews its leases.
                std::thread::sleep(TOO_LONG);
            }
            // One push in five is sent piece by piece.
            let pushed = match push % 5 {
                0 => self.push_in_pieces(token, push),
                _ => self.push(token, push),
            };
            match (pushed, self.setting.synchronous) {
                (Ok(Push::Applied { .. }), false) | (Ok(Push::Accepted { .. }), true) => {
                    self.log.acknowledged(push)?;
                    self.history.acknowledge(push);
                }
                (Ok(Push::Stale { .. }), true) => {
                    self.log.stale(push)?;
                    self.history.forget(push);
                }
                (Err(error), _) if self.setting.expires && is_expiry(&*error) => {
                    self.log.refused(push)?;
                    self.history.forget(push);
                }
                (Ok(other), _) => return Err(format!("push {push} ended with {other:?}").into()),
                (Err(error), _) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the worker makes another push.
    ///
    /// In asynchronous mode each worker stops by itself. A synchronous step needs several workers,
    /// so the chief finishes the training for all.
    fn continues(&mut self) -> Result<bool, Box<dyn Error>> {
        let stop = self.setting.stop_file().exists();
        if stop && self.setting.synchronous {
            if self.worker == 0 {
                self.session.finish()?;
            }
            return Ok(true);
        }
        Ok(!stop)
    }

    /// Pushes whole gradients: one for all elements of the dense variables, for the push's own
    /// element of the ledger, and for its rows. The gradients are minus one, since the learning
    /// rate is one.
    fn push(&mut self, token: Token, push: u64) -> Result<Push, Box<dyn Error>> {
        let (chunk, element) = self.setting.entry(push);
        let mut gradients = self.session.gradients();
        gradients.view_mut::<f32>(ADAM)?.fill(-1.0);
        let ids = in_quarters(row(push));
        gradients.view_mut(&sums(self.worker))?.copy_from_slice(&at_rows(ids));
        gradients.set_rows(&heavy_rows(self.worker), &ids, &ROW_OF_EACH)?;
        for shard in 0..SHARDS {
            gradients.view_mut::<f32>(&dense(shard))?.fill(-1.0);
            let name = ledger(self.worker, chunk, shard);
            match self.setting.has_halves() {
                true => set_one(gradients.view_mut(&name)?, element, f16::ZERO, f16::NEG_ONE),
                false => set_one(gradients.view_mut(&name)?, element, 0.0_f32, -1.0),
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
        let mut entries = [0.0_f32; CHUNK as usize];
        let mut halves = [f16::ZERO; CHUNK as usize];
        entries[element] = -1.0;
        halves[element] = f16::NEG_ONE;
        self.log.invoke(push)?;
        self.history.invoke(push);
        let mut pushing = self.session.begin(token)?;
        let ids = in_quarters(row(push));
        pushing.variable(ADAM, &[-1.0_f32; SHARDS * QUARTER as usize])?;
        pushing.variable(&sums(self.worker), &at_rows(ids))?;
        pushing.rows(&heavy_rows(self.worker), &ids, &ROW_OF_EACH)?;
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

    /// Checks the pulled values: each shard's are of one version, not older than in the pull
    /// before, and have this worker's last acknowledged push.
    fn check_values(&mut self, push: u64) -> Result<(), Box<dyn Error>> {
        let mut verdict = LedgerVerdict::default();
        let before = push.saturating_sub(1);
        let (chunk, element) = self.setting.entry(before);
        // Only the last push is checked here; the judge checks all at the end.
        let last = self.history.entries[(before % self.setting.ledger_elements()) as usize];
        let mut entered = [0.0; SHARDS];
        for (shard, entered) in entered.iter_mut().enumerate() {
            let name = dense(shard);
            let pushes = verdict.uniform(self.params.view(&name)?, &name);
            if pushes < self.updates_seen[shard] {
                let updates_seen = self.updates_seen[shard];
                verdict.lost += 1;
                verdict.names.push(format!("{name} has gone back from {updates_seen} to {pushes}"));
            }
            self.updates_seen[shard] = pushes;
            let name = ledger(self.worker, chunk, shard);
            *entered = self.setting.entries(&self.params, &name)?[element];
        }
        if self.history.is_first_there(before) {
            let name = || format!("ledger/{}[{before}]", self.worker);
            verdict.everywhere(entered, last, self.setting.synchronous, name);
        }
        match verdict.is_clean() {
            true => Ok(()),
            false => Err(format!("a pull before push {push} shows {verdict:?}").into()),
        }
    }
}

fn of_session<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a pushpull::Error> {
    error.downcast_ref()
}

/// Whether the step owner has ended this worker's run, which had stayed away for too long.
fn has_ended(error: &pushpull::Error) -> bool {
    matches!(error, pushpull::Error::Refused { refusal: Refusal::UnknownEpoch { .. }, .. })
}

/// Whether a push was refused because its token no longer belongs to this worker.
fn is_expiry(error: &(dyn Error + 'static)) -> bool {
    matches!(
        of_session(error),
        Some(pushpull::Error::Refused { refusal: Refusal::Token { .. }, .. })
    )
}

/// The gradient of one row in each partition.
const ROW_OF_EACH: [f32; SHARDS * WIDTH as usize] = [-1.0; SHARDS * WIDTH as usize];

/// Returns a gradient of minus one at these elements, one in each partition.
fn at_rows(ids: [u64; SHARDS]) -> [f32; SHARDS * ROWS as usize] {
    let mut gradient = [0.0; SHARDS * ROWS as usize];
    ids.iter().for_each(|&id| gradient[id as usize] = -1.0);
    gradient
}

/// Sets a gradient to `one` at one element and to `zero` elsewhere. The memory may hold an old
/// gradient.
fn set_one<T: Copy>(gradient: &mut [T], element: usize, zero: T, one: T) {
    gradient.fill(zero);
    gradient[element] = one;
}

/// Checks that each variable is on the shard that its name says, as the judge assumes.
fn check_places(setting: &ChaosSetting, session: &Worker) -> Result<(), Box<dyn Error>> {
    let placement = session.placement().ok_or("a joined worker has no placement")?;
    let mut index = 0;
    for (id, variable) in setting.variables().iter().enumerate() {
        for placed in placement.of_variable(pushpull::variable::VariableId(id as u32)) {
            let shard = setting.shard(index % SHARDS);
            if placed.shard != shard {
                return Err(format!("{} is not on {shard}: {placed:?}", variable.name()).into());
            }
            index += 1;
        }
    }
    Ok(())
}
