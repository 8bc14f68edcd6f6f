//! The workers, as the test sees them: processes of this binary, and what they write down.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use crate::history::{History, Log};
use crate::links::Links;
use crate::process::{BLINK, Process, TIMEOUT};
use crate::setting::{SHARDS, Setting, WORKERS};
use crate::training::{self, GIVEN_UP};

/// What a worker may have mapped that servers lend: of each shard a board, a desk, values and a tray, and
/// those of its server before while a reconnect is under way.
const MEAN_GRADIENTS_MAX: usize = 2 * 4 * SHARDS;

/// All workers of one cluster.
#[derive(Debug)]
pub(crate) struct Workers {
    setting: Setting,
    links: Option<Arc<Links>>,
    running: Vec<Process>,
    pub(crate) histories: Vec<History>,
    /// Workers that ended because the step owner had retired them.
    pub(crate) given_up: u64,
}

impl Workers {
    pub(crate) fn start(setting: &Setting, links: Option<Arc<Links>>) -> Workers {
        let history = |worker| History::of(setting.history(worker), setting.ledger_elements());
        let histories = (0..WORKERS).map(history).collect();
        let (setting, running) = (setting.clone(), Vec::new());
        let mut workers = Workers { setting, links, running, histories, given_up: 0 };
        workers.start_all();
        workers
    }

    /// Starts the processes of all workers.
    pub(crate) fn start_all(&mut self) {
        self.running = (0..WORKERS).map(|worker| self.start_one(worker)).collect();
    }

    fn start_one(&self, worker: u32) -> Process {
        let hosts = match &self.links {
            Some(links) => links.of_worker(worker as usize),
            None => self.setting.hosts.clone(),
        };
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command.args(training::arguments(&self.setting, worker, &hosts));
        let log = self.setting.folder.join(format!("worker-{worker}.log"));
        Process::start(format!("worker {worker}"), &mut command, log)
    }

    /// Kills all workers; what they had under way has no answer, and gets none.
    pub(crate) fn kill_all(&mut self) {
        self.keep_running();
        self.running.iter_mut().for_each(Process::strike);
        self.running.drain(..).for_each(Process::bury);
        self.catch_up();
        self.histories.iter_mut().for_each(|history| history.open = None);
    }

    /// Writes down, while no worker lives, that a checkpoint was restored.
    pub(crate) fn note_restore(&mut self) {
        for worker in 0..WORKERS {
            let log = Log::open(&self.setting.history(worker));
            log.and_then(|mut log| log.restored()).expect("a history can be written");
        }
        self.catch_up();
    }

    /// Stops a worker, or lets it go on.
    pub(crate) fn stop(&self, worker: usize) {
        self.running[worker].stop();
    }

    pub(crate) fn go_on(&self, worker: usize) {
        self.running[worker].go_on();
    }

    /// Kills a worker and starts it anew under its name: a new self that servers must not take
    /// for the old one.
    pub(crate) fn kill_and_restart(&mut self, worker: usize) {
        self.keep_running();
        let mut killed = self.running.remove(worker);
        killed.strike();
        // The new self reads what the old one has written, so that one has to be gone.
        killed.bury();
        self.restart(worker);
    }

    /// Starts a worker whose old process has ended and was removed from `running`.
    fn restart(&mut self, worker: usize) {
        self.catch_up();
        self.histories[worker].open = None;
        self.running.insert(worker, self.start_one(worker as u32));
    }

    /// Whether a push is under way that nobody has acknowledged.
    pub(crate) fn have_open_pushes(&mut self) -> bool {
        self.catch_up();
        self.histories.iter().any(|history| history.open.is_some())
    }

    /// Waits until a worker has a push under way.
    pub(crate) fn await_open_push_of(&mut self, worker: usize) {
        let since = Instant::now();
        while self.histories[worker].open.is_none() {
            self.keep_running();
            assert!(since.elapsed() < TIMEOUT, "worker {worker} pushes nothing in {TIMEOUT:?}");
            std::thread::sleep(BLINK);
            self.catch_up();
        }
    }

    /// Waits until a push is under way.
    pub(crate) fn await_open_push(&mut self) {
        let since = Instant::now();
        while !self.have_open_pushes() {
            self.keep_running();
            assert!(since.elapsed() < TIMEOUT, "nobody pushes anything in {TIMEOUT:?}");
            std::thread::sleep(BLINK);
        }
    }

    pub(crate) fn acknowledged(&mut self) -> u64 {
        self.catch_up();
        self.histories.iter().map(|history| history.acknowledged).sum()
    }

    /// Waits until more than so many pushes are acknowledged: the training goes on.
    pub(crate) fn await_more_than(&mut self, acknowledged: u64) {
        let since = Instant::now();
        while self.acknowledged() <= acknowledged {
            self.keep_running();
            let open: Vec<_> = self.histories.iter().map(|history| history.open).collect();
            assert!(since.elapsed() < TIMEOUT, "no progress in {TIMEOUT:?}, open are {open:?}");
            std::thread::sleep(BLINK);
        }
    }

    /// Waits until each worker has had a push acknowledged.
    pub(crate) fn await_all(&mut self) {
        let since = Instant::now();
        while !self.histories.iter().all(|history| history.acknowledged > 0) {
            self.keep_running();
            self.catch_up();
            let done: Vec<_> = self.histories.iter().map(|history| history.acknowledged).collect();
            assert!(since.elapsed() < TIMEOUT, "the training does not begin: {done:?}");
            std::thread::sleep(BLINK);
        }
    }

    /// Restarts workers that the step owner retired after three leases away with a push half made, as a
    /// supervisor would, and asserts that no other has ended.
    pub(crate) fn keep_running(&mut self) {
        for worker in 0..self.running.len() {
            let ended = self.running[worker].has_ended();
            if ended.and_then(|status| status.code()) == Some(GIVEN_UP) {
                self.given_up += 1;
                self.running.remove(worker);
                self.restart(worker);
            }
            self.running[worker].assert_alive();
        }
    }

    /// Has them end after the push they are at, and waits for that; what they have written, and how many
    /// were given up.
    pub(crate) fn finish(mut self) -> (Vec<History>, u64) {
        self.keep_running();
        for worker in &self.running {
            let shared = worker.shared_memories();
            assert!(
                shared <= MEAN_GRADIENTS_MAX,
                "a worker has {shared} memories mapped, of servers long gone"
            );
        }
        std::fs::write(self.setting.stop_file(), "").expect("the stop file can be written");
        for mut worker in self.running.drain(..) {
            match worker.await_end().code() {
                Some(GIVEN_UP) => self.given_up += 1,
                _ => worker.finish(),
            }
        }
        self.catch_up();
        (self.histories, self.given_up)
    }

    pub(crate) fn catch_up(&mut self) {
        for (worker, history) in self.histories.iter_mut().enumerate() {
            history.catch_up();
            if let Some(fault) = history.faults.first() {
                panic!("worker {worker}: {fault}");
            }
        }
    }
}
