//! [`CommandQueue`]: commands on their way from callers to the session.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::caller::QueuedCommand;

/// The most operations queued for the session. A caller that waits for some of its operations stays
/// below this.
pub(super) const COMMANDS_MAX: usize = 1024;

/// The commands that the session has not taken yet.
///
/// A caller that adds one calls the leader of the session afterwards, which finds it here.
#[derive(Debug, Default)]
pub(super) struct CommandQueue(Mutex<QueueState>);

#[derive(Debug, Default)]
struct QueueState {
    commands: VecDeque<QueuedCommand>,
    /// Whether the callers or the session have ended. No command is added then.
    is_ended: bool,
}

/// The reason why a command was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotQueued {
    /// [`COMMANDS_MAX`] commands wait.
    Full,
    /// The session has ended, or is about to.
    Ended,
}

impl CommandQueue {
    /// Locks, ignoring poison: each change is one call.
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a command. A refused one is dropped, which returns what it carries.
    pub(super) fn add(&self, command: QueuedCommand) -> Result<(), NotQueued> {
        let mut state = self.state();
        let refused = match () {
            () if state.is_ended => NotQueued::Ended,
            () if state.commands.len() >= COMMANDS_MAX => NotQueued::Full,
            () => {
                state.commands.push_back(command);
                return Ok(());
            }
        };
        // What the command returns may be taken by another thread that then adds a command.
        drop(state);
        drop(command);
        Err(refused)
    }

    /// Takes all commands, the oldest first.
    pub(super) fn take(&self) -> VecDeque<QueuedCommand> {
        std::mem::take(&mut self.state().commands)
    }

    /// Refuses all later commands. Those in the queue can still be taken.
    pub(super) fn end(&self) {
        self.state().is_ended = true;
    }

    /// Returns whether the queue has ended and nothing is left in it.
    pub(super) fn is_done(&self) -> bool {
        let state = self.state();
        state.is_ended && state.commands.is_empty()
    }

    /// Ends the queue and drops its commands.
    pub(super) fn close(&self) {
        self.end();
        drop(self.take());
    }
}
