//! The workers of a cluster: processes of this binary, with their histories.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use crate::history::{History, Log};
use crate::links::Links;
use crate::process::{LoggedProcess, POLL_INTERVAL, TIMEOUT};
use crate::setting::{ChaosSetting, SHARDS, WORKERS};
use crate::training::{self, RETIRED};

/// The maximum number of shared mappings of a worker. For each shard it has a block table, reader
/// slots, values and a push buffer; during a reconnect those of the earlier server process too.
const SHARED_MAPPINGS_MAX: usize = 2 * 4 * SHARDS;

/// All workers of one cluster.
#[derive(Debug)]
pub(crate) struct Workers {
    setting: ChaosSetting,
    links: Option<Arc<Links>>,
    running: Vec<LoggedProcess>,
    pub(crate) histories: Vec<History>,
    /// How many workers ended because the step owner had retired them.
    pub(crate) given_up: u64,
}

impl Workers {
    pub(crate) fn start(setting: &ChaosSetting, links: Option<Arc<Links>>) -> Workers {
        let history = |worker| History::of(setting.history(worker), setting.ledger_elements());
        let histories = (0..WORKERS).map(history).collect();
        let setting = setting.clone();
        let running = Vec::new();
        let mut workers = Workers { setting, links, running, histories, given_up: 0 };
        workers.start_all();
        workers
    }

    /// Starts the processes of all workers.
    pub(crate) fn start_all(&mut self) {
        self.running = (0..WORKERS).map(|worker| self.start_one(worker)).collect();
    }

    fn start_one(&self, worker: u32) -> LoggedProcess {
        let hosts = match &self.links {
            Some(links) => links.of_worker(worker as usize),
            None => self.setting.hosts.clone(),
        };
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command.args(training::arguments(&self.setting, worker, &hosts));
        let log = self.setting.folder.join(format!("worker-{worker}.log"));
        LoggedProcess::start(format!("worker {worker}"), &mut command, log)
    }

    /// Kills all workers. Their open pushes will never have an outcome.
    pub(crate) fn kill_all(&mut self) {
        self.keep_running();
        self.running.iter_mut().for_each(LoggedProcess::kill);
        self.running.drain(..).for_each(LoggedProcess::wait_killed);
        self.catch_up();
        self.histories.iter_mut().for_each(|history| history.open = None);
    }

    /// Logs in each history that a checkpoint was restored. No worker may be running.
    pub(crate) fn note_restore(&mut self) {
        for worker in 0..WORKERS {
            let log = Log::open(&self.setting.history(worker));
            log.and_then(|mut log| log.restored()).expect("a history can be written");
        }
        self.catch_up();
    }

    /// Stops a worker with SIGSTOP, until [`Workers::resume`].
    pub(crate) fn stop(&self, worker: usize) {
        self.running[worker].stop();
    }

    pub(crate) fn resume(&self, worker: usize) {
        self.running[worker].resume();
    }

    /// Kills a worker and starts a new process of its task, which the servers must not confuse with
    /// the old one.
    pub(crate) fn kill_and_restart(&mut self, worker: usize) {
        self.keep_running();
        let mut killed = self.running.remove(worker);
        killed.kill();
        // The new process reads the history, so the old one must have ended.
        killed.wait_killed();
        self.restart(worker);
    }

    /// Starts a worker again whose process has ended and was removed from `running`.
    fn restart(&mut self, worker: usize) {
        self.catch_up();
        self.histories[worker].open = None;
        self.running.insert(worker, self.start_one(worker as u32));
    }

    /// Whether any worker has a push in flight.
    pub(crate) fn have_open_pushes(&mut self) -> bool {
        self.catch_up();
        self.histories.iter().any(|history| history.open.is_some())
    }

    /// Waits until this worker has a push in flight.
    pub(crate) fn await_open_push_of(&mut self, worker: usize) {
        let since = Instant::now();
        while self.histories[worker].open.is_none() {
            self.keep_running();
            assert!(since.elapsed() < TIMEOUT, "worker {worker} pushes nothing in {TIMEOUT:?}");
            std::thread::sleep(POLL_INTERVAL);
            self.catch_up();
        }
    }

    /// Waits until any worker has a push in flight.
    pub(crate) fn await_open_push(&mut self) {
        let since = Instant::now();
        while !self.have_open_pushes() {
            self.keep_running();
            assert!(since.elapsed() < TIMEOUT, "no worker pushes anything in {TIMEOUT:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    pub(crate) fn acknowledged(&mut self) -> u64 {
        self.catch_up();
        self.histories.iter().map(|history| history.acknowledged).sum()
    }

    /// Waits until more than `acknowledged` pushes are acknowledged, which shows that the training
    /// continues.
    pub(crate) fn await_more_than(&mut self, acknowledged: u64) {
        let since = Instant::now();
        while self.acknowledged() <= acknowledged {
            self.keep_running();
            let open: Vec<_> = self.histories.iter().map(|history| history.open).collect();
            assert!(since.elapsed() < TIMEOUT, "no progress in {TIMEOUT:?}, open pushes: {open:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until each worker has an acknowledged push.
    pub(crate) fn await_all(&mut self) {
        let since = Instant::now();
        while !self.histories.iter().all(|history| history.acknowledged > 0) {
            self.keep_running();
            self.catch_up();
            let done: Vec<_> = self.histories.iter().map(|history| history.acknowledged).collect();
            assert!(since.elapsed() < TIMEOUT, "the training does not begin: {done:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Restarts workers that the step owner has retired, as a supervisor would. Asserts that no
    /// other worker has ended.
    ///
    /// The step owner retires a worker that is absent for three leases with an incomplete push.
    pub(crate) fn keep_running(&mut self) {
        for worker in 0..self.running.len() {
            let ended = self.running[worker].has_ended();
            if ended.and_then(|status| status.code()) == Some(RETIRED) {
                self.given_up += 1;
                self.running.remove(worker);
                self.restart(worker);
            }
            self.running[worker].assert_alive();
        }
    }

    /// Lets all workers end after their current push and waits for them. Returns their histories
    /// and how many workers were retired.
    pub(crate) fn finish(mut self) -> (Vec<History>, u64) {
        self.keep_running();
        for worker in &self.running {
            let shared = worker.shared_memories();
            assert!(
                shared <= SHARED_MAPPINGS_MAX,
                "a worker has {shared} shared mappings: some of earlier servers are left"
            );
        }
        std::fs::write(self.setting.stop_file(), "").expect("the stop file can be written");
        for mut worker in self.running.drain(..) {
            match worker.await_end().code() {
                Some(RETIRED) => self.given_up += 1,
                _ => worker.finish(),
            }
        }
        self.catch_up();
        (self.histories, self.given_up)
    }

    /// Reads the new lines of all histories.
    ///
    /// # Panics
    /// If a worker has logged a fault.
    pub(crate) fn catch_up(&mut self) {
        for (worker, history) in self.histories.iter_mut().enumerate() {
            history.catch_up();
            if let Some(fault) = history.faults.first() {
                panic!("worker {worker}: {fault}");
            }
        }
    }
}
