//! The first checkpoint of a session, while a server is silent and is then killed.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use pushpull::blocking::TrainingSession;
use pushpull::error::Chain;
use pushpull::training::{Flow, Hook, HookError, JoinReport, TrainingConfig};
use pushpull::worker::SavedCheckpoint;

use crate::daemons::Daemons;
use crate::damage::DamagedName;
use crate::process::{POLL_INTERVAL, TIMEOUT};
use crate::setting::{ChaosSetting, LEASE};

/// The interval of the session's saves. One that has failed is made again after it.
const SAVE_EVERY: Duration = Duration::from_millis(200);

/// Stops the session between its join and its first save until the test goes on, and hears of the
/// first checkpoint.
struct SaveWatch {
    joined: Sender<()>,
    may_save: Receiver<()>,
    is_saved: Arc<AtomicBool>,
}

impl Hook for SaveWatch {
    fn joined(&mut self, _: &JoinReport<'_>) -> Result<Flow, HookError> {
        // A session that joins again finds the test gone on.
        if self.joined.send(()).is_ok() {
            let _ = self.may_save.recv();
        }
        Ok(Flow::Continue)
    }

    fn saved(&mut self, _: &SavedCheckpoint) -> Result<Flow, HookError> {
        self.is_saved.store(true, Ordering::Relaxed);
        Ok(Flow::Continue)
    }
}

/// Runs a session as the chief of new servers until it has saved a checkpoint. Kills a server while
/// the first one is written: the session must go on. It pushes nothing.
pub(crate) fn kill_during(setting: &ChaosSetting, daemons: &mut Daemons, victim: usize) {
    let (joined, has_joined) = mpsc::channel();
    let (save, may_save) = mpsc::channel();
    let watch = SaveWatch { joined, may_save, is_saved: Arc::default() };
    std::thread::scope(|scope| {
        let session =
            scope.spawn(move || train(setting, watch).map_err(|error| Chain(&*error).to_string()));
        has_joined.recv_timeout(TIMEOUT).expect("the chief joins new servers");
        daemons.pause(victim);
        drop((has_joined, save));
        await_unpublished(daemons);
        daemons.kill(victim);
        let since = daemons.restart(victim);
        daemons.await_answers(victim, since);
        if let Err(error) = session.join().expect("the session does not panic") {
            panic!("a server was killed during the first save, and the session ended: {error}");
        }
    });
}

/// Takes tokens and returns them until a checkpoint is saved.
fn train(setting: &ChaosSetting, watch: SaveWatch) -> Result<(), Box<dyn Error>> {
    let is_saved = watch.is_saved.clone();
    let config = TrainingConfig::new(setting.worker_config(0).timeout(LEASE))
        .variables(setting.variables())
        .checkpoint_every(SAVE_EVERY)
        .hook(watch);
    let mut session = TrainingSession::start(config)?;
    let since = Instant::now();
    while !is_saved.load(Ordering::Relaxed) {
        let Some(step) = session.step()? else {
            return Err("the training has ended".into());
        };
        step.skip();
        if since.elapsed() > TIMEOUT {
            return Err(format!("no checkpoint is saved in {TIMEOUT:?}").into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    session.close()?;
    Ok(())
}

/// Waits until a checkpoint is being written, but not for ever: the folder may be made by the
/// server that is silent.
fn await_unpublished(daemons: &Daemons) {
    let since = Instant::now();
    let is_written = || {
        let entries = fs::read_dir(daemons.checkpoints()).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .any(|name| DamagedName::of(&name).is_none())
    };
    while !is_written() && since.elapsed() < LEASE {
        std::thread::sleep(POLL_INTERVAL);
    }
}
