//! [`ProcessProgram`]: what the processes of a family of scenarios do.

use std::fmt::Debug;
use std::time::Instant;

use pushpull_common::ids::ShardId;
use pushpull_worker::Error;
use pushpull_worker::simulation::WorkerAnswer;

use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::world::SimWorld;

/// The program of a process with a session. A family of scenarios has one type of them, and the
/// world drives it.
pub(crate) trait ProcessProgram: Sized + Debug {
    /// What must hold in every run of the family.
    type Checker;
    /// An event that programs schedule for themselves.
    type Timer: Copy + Debug + PartialEq;

    /// Returns the task of the process, in words.
    fn task_name(&self) -> String;

    /// Whether the process is on another host than the parameter servers.
    fn is_remote(&self) -> bool;

    /// Describes what the program waits for; `None` if it has ended.
    fn waits(&self) -> Option<String>;

    /// Starts a process of a worker task.
    fn start(world: &mut SimWorld<Self>, task: u32);

    /// Handles the reply to an operation of a process's session.
    fn replied(
        world: &mut SimWorld<Self>,
        process: usize,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    );

    /// Handles an event that a program has scheduled.
    fn timer(world: &mut SimWorld<Self>, timer: Self::Timer);

    /// Returns the process that an event is meant for.
    fn process_of(timer: Self::Timer) -> usize;

    /// Decides what follows from the end of a process.
    fn ended(world: &mut SimWorld<Self>, process: usize);

    /// Injects a fault of this family. Returns false if it is not possible now.
    fn inject(world: &mut SimWorld<Self>, fault: FaultKind, chance: &mut SimChance) -> bool;

    /// Whether the run is over. Called after the faults have ended.
    fn is_over(world: &mut SimWorld<Self>) -> bool;

    /// Checks the step count of a shard that a new process has opened.
    fn opened(checker: &mut Self::Checker, shard: ShardId, steps: u64);

    /// Checks a synchronous step that a shard has applied.
    fn applied(checker: &mut Self::Checker, shard: ShardId, step: u64, tokens: Vec<u64>);

    /// Records that the step owner has reported a gradient that is applied on some shards only.
    fn partly_applied(_: &mut Self::Checker, _token: u64) {}

    /// Checks a shard after an input.
    fn shard_changed(_: &mut SimWorld<Self>, _shard: ShardId) {}

    /// Returns the worker task whose functions the process serves, if it does.
    fn serves(&self) -> Option<u32> {
        None
    }

    /// Takes the wake-up time of the parts of a program beside its session.
    fn wake_at(&self) -> Option<Instant> {
        None
    }

    /// Tells the parts of a program beside its session that time has passed.
    fn tick(_: &mut SimWorld<Self>, _process: usize) {}

    /// Handles an event of a connection to a function server.
    fn call_event(_: &mut SimWorld<Self>, _process: usize, event: CallLinkEvent<'_>) -> bool {
        unreachable!("no process of the family has a connection to another: {event:?}")
    }
}

/// An event of a connection between a coordinator and a function server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallLinkEvent<'a> {
    /// The client's connection of this number is made.
    Connected(u64),
    /// Bytes have arrived at the client. The handler returns false if they break the protocol.
    ClientReceived(u64, &'a [u8]),
    /// The client notices the end of its connection.
    ClientLost(u64),
    /// Bytes have arrived at the server. The handler returns false if they break the protocol.
    ServerReceived(u64, &'a [u8]),
    /// The server notices the end of a connection.
    ServerLost(u64),
}
