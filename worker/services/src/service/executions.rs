//! [`Executions`]: the running functions of a server, and the limits for further ones.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use pushpull_common::ids::Incarnation;

use super::io::{ExecutionId, ServiceConfig};

/// The most blocking functions of all clients that run at once, beside the first of each client.
const BLOCKING_MAX: usize = 256;

/// The most functions that lend their threads at once. Beyond that a function keeps its own.
const LENT_MAX: usize = 512;

/// The most abandoned executions of one client that do not count among its threads. Beyond that,
/// further blocking ones count, and no asynchronous one begins.
const ABANDONED_MAX: usize = 16;

/// A running function, for one call of a client.
#[derive(Debug)]
pub(super) struct Execution {
    pub(super) client: Incarnation,
    pub(super) call: u64,
    pub(super) function: String,
    pub(super) blocking: bool,
    /// The cause of the function's wait, in its own words. A blocking function lends its thread
    /// meanwhile.
    pub(super) awaited: Option<String>,
    /// Whether the function lends its thread.
    lends: bool,
    /// Set once the caller has stopped waiting. After the inner time the execution counts as
    /// unreturned; `None` inside if its call had no deadline.
    abandoned: Option<Option<Instant>>,
    /// The bytes of the inputs that the function holds after the end of its call.
    held: u64,
}

/// The executions of one kind, blocking or asynchronous, by whether a caller waits for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KindLoad {
    /// The number of executions that take a place.
    running: usize,
    /// The number of executions without a waiting caller.
    abandoned: usize,
}

impl KindLoad {
    fn change(&mut self, running: isize, abandoned: isize) {
        self.running = self.running.saturating_add_signed(running);
        self.abandoned = self.abandoned.saturating_add_signed(abandoned);
    }
}

/// The load of one client: its executions by kind, and the memory that they hold.
#[derive(Clone, Copy, Debug, Default)]
struct ClientLoad {
    /// The number of all executions of the client.
    total: usize,
    blocking: KindLoad,
    asynchronous: KindLoad,
    held: u64,
}

impl ClientLoad {
    /// Returns the number of executions without a waiting caller.
    fn abandoned(&self) -> usize {
        self.blocking.abandoned + self.asynchronous.abandoned
    }
}

/// The functions that run on a server.
///
/// Each client has threads of its own, so its long calls keep no other client out. A server that
/// calls its own functions has one client for each depth of calls. So its functions do not wait for
/// each other's threads either.
///
/// An abandoned execution takes no place of its client, up to a limit, although it still has its
/// thread or its future. In the total of all clients every execution counts. A client has few
/// abandoned ones, so it keeps no other client out.
///
/// Invariant: the loads are the sums over all executions.
#[derive(Debug, Default)]
pub(super) struct Executions {
    all: BTreeMap<ExecutionId, Execution>,
    loads: HashMap<Incarnation, ClientLoad>,
    blocking: KindLoad,
    asynchronous: KindLoad,
    threads_lent: usize,
    last: u64,
}

impl Execution {
    /// Returns whether the execution takes a place among those that run.
    fn runs(&self) -> bool {
        self.abandoned.is_none() && !self.lends
    }
}

impl Executions {
    /// Begins an execution of a call.
    pub(super) fn begin(
        &mut self,
        client: Incarnation,
        call: u64,
        function: &str,
        blocking: bool,
    ) -> ExecutionId {
        self.last += 1;
        let execution = Execution {
            client,
            call,
            function: function.to_owned(),
            blocking,
            awaited: None,
            lends: false,
            abandoned: None,
            held: 0,
        };
        self.all.insert(ExecutionId(self.last), execution);
        self.count(client, blocking, 1, 0);
        self.loads.entry(client).or_default().total += 1;
        ExecutionId(self.last)
    }

    /// Changes the number of a client's executions that take a place, and that of the abandoned
    /// ones.
    fn count(&mut self, client: Incarnation, blocking: bool, running: isize, abandoned: isize) {
        let load = self.loads.entry(client).or_default();
        let (own, all) = match blocking {
            true => (&mut load.blocking, &mut self.blocking),
            false => (&mut load.asynchronous, &mut self.asynchronous),
        };
        own.change(running, abandoned);
        all.change(running, abandoned);
    }

    pub(super) fn get(&self, execution: ExecutionId) -> Option<&Execution> {
        self.all.get(&execution)
    }

    /// Ends an execution, and frees its place and its memory.
    pub(super) fn remove(&mut self, id: ExecutionId) -> Option<Execution> {
        let execution = self.all.remove(&id)?;
        let client = execution.client;
        self.threads_lent -= usize::from(execution.lends);
        let running = -isize::from(execution.runs());
        let abandoned = -isize::from(execution.abandoned.is_some());
        self.count(client, execution.blocking, running, abandoned);
        let load = self.loads.entry(client).or_default();
        load.held -= execution.held;
        load.total -= 1;
        if load.total == 0 {
            self.loads.remove(&client);
        }
        Some(execution)
    }

    /// Records the cause of a function's wait, or with `None` its end. A function that goes on
    /// takes a thread at once, also beyond their number, because it then ends sooner.
    pub(super) fn set_awaited(&mut self, id: ExecutionId, awaited: Option<String>) {
        let Some(execution) = self.all.get_mut(&id) else { return };
        let client = execution.client;
        let blocking = execution.blocking;
        let ran = execution.runs();
        let lends =
            blocking && awaited.is_some() && (execution.lends || self.threads_lent < LENT_MAX);
        self.threads_lent -= usize::from(execution.lends);
        self.threads_lent += usize::from(lends);
        execution.lends = lends;
        execution.awaited = awaited;
        match (ran, execution.runs()) {
            (true, false) => self.count(client, blocking, -1, 0),
            (false, true) => self.count(client, blocking, 1, 0),
            _ => {}
        }
    }

    /// Abandons an execution whose caller has stopped waiting, so that another may run in its
    /// place. It holds this many bytes, and should have returned by `until`.
    pub(super) fn abandon(&mut self, id: ExecutionId, until: Option<Instant>, held: u64) {
        let Some(execution) = self.all.get_mut(&id) else { return };
        let client = execution.client;
        let blocking = execution.blocking;
        let ran = execution.runs();
        let is_first = execution.abandoned.replace(until).is_none();
        if !is_first {
            return;
        }
        execution.held = held;
        self.count(client, blocking, -isize::from(ran), 1);
        self.loads.entry(client).or_default().held += held;
    }

    /// Returns whether another function of a client may begin. A client without a running function
    /// may begin one as long as abandoned executions leave a place.
    pub(super) fn may_begin(
        &self,
        config: &ServiceConfig,
        client: Incarnation,
        blocking: bool,
    ) -> bool {
        self.place_awaited(config, client, blocking).is_none()
    }

    /// Returns the reason why another function of a client may not begin, in words; `None` if it
    /// may.
    pub(super) fn place_awaited(
        &self,
        config: &ServiceConfig,
        client: Incarnation,
        blocking: bool,
    ) -> Option<String> {
        let load = self.loads.get(&client).copied().unwrap_or_default();
        let abandoned = load.abandoned();
        let stuck = abandoned.saturating_sub(ABANDONED_MAX);
        let (own, all, all_max) = match blocking {
            true => (load.blocking, self.blocking, BLOCKING_MAX),
            false => (load.asynchronous, self.asynchronous, config.asynchronous_max),
        };
        let own = own.running + stuck;
        let threads = config.threads;
        if blocking && own >= threads {
            return Some(format!("the calls of this client have all {threads} of theirs"));
        }
        if !blocking && stuck > 0 {
            return Some(format!(
                "{abandoned} executions for this client go on although nobody waits for them"
            ));
        }
        let is_full =
            all.abandoned >= all_max || (own > 0 && all.running + all.abandoned >= all_max);
        is_full.then(|| {
            let what = if blocking { "calls" } else { "asynchronous calls" };
            let abandoned = match all.abandoned {
                0 => String::new(),
                abandoned => format!(", and nobody waits for {abandoned} of them"),
            };
            format!("the {what} of all clients have all {all_max}{abandoned}")
        })
    }

    /// Returns the number of executions of a function for a client that should have returned.
    pub(super) fn unreturned(&self, now: Instant, client: Incarnation, function: &str) -> usize {
        if self.loads.get(&client).is_none_or(|load| load.abandoned() == 0) {
            return 0;
        }
        let is_late = |of: &&Execution| of.abandoned.flatten().is_some_and(|until| until <= now);
        let own = self.all.values().filter(|of| of.client == client && of.function == function);
        own.filter(is_late).count()
    }

    /// Returns the bytes that abandoned executions of a client hold.
    pub(super) fn held(&self, client: Incarnation) -> u64 {
        self.loads.get(&client).map_or(0, |load| load.held)
    }

    /// Returns the bytes that abandoned executions of all clients hold.
    pub(super) fn held_by_all(&self) -> u64 {
        self.loads.values().map(|load| load.held).sum()
    }

    /// # Panics
    /// If the loads are not those of the executions, or a client has more than it may have.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn check_invariants(&self) {
        let counts = |blocking: bool, of: Option<Incarnation>| {
            let all = self.all.values().filter(|it| it.blocking == blocking);
            let mut load = KindLoad::default();
            for it in all.filter(|it| of.is_none_or(|client| it.client == client)) {
                load.change(it.runs().into(), it.abandoned.is_some().into());
            }
            load
        };
        assert_eq!((self.blocking, self.asynchronous), (counts(true, None), counts(false, None)));
        for (&client, load) in &self.loads {
            let own = self.all.values().filter(|it| it.client == client);
            let held: u64 = own.map(|it| it.held).sum();
            assert_eq!(load.held, held, "the load of {client:?}");
            let counted = (counts(true, Some(client)), counts(false, Some(client)));
            assert_eq!((load.blocking, load.asynchronous), counted, "the load of {client:?}");
        }
        assert_eq!(
            self.threads_lent,
            self.all.values().filter(|it| it.lends).count(),
            "lent threads"
        );
    }

    /// Yields the executions whose callers wait.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn awaited(&self) -> impl Iterator<Item = &Execution> {
        self.all.values().filter(|execution| execution.abandoned.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    fn begin(executions: &mut Executions, client: u64) -> ExecutionId {
        executions.begin(Incarnation(client), 1, "f", true)
    }

    #[test]
    fn blocking_functions_of_all_clients_are_limited_beside_the_first_of_each() {
        let config = ServiceConfig { threads: 2, ..config() };
        let mut executions = Executions::default();
        let may_begin = |executions: &Executions, client, blocking| {
            executions.may_begin(&config, Incarnation(client), blocking)
        };
        let clients = 1..BLOCKING_MAX as u64;
        let first: Vec<_> = clients.map(|client| begin(&mut executions, client)).collect();
        assert!(may_begin(&executions, 1, true), "one place is left");
        begin(&mut executions, 1);
        assert!(!may_begin(&executions, 2, true));
        assert!(may_begin(&executions, 2, false), "an asynchronous function needs no thread");
        assert!(may_begin(&executions, BLOCKING_MAX as u64, true), "the first of a client");
        executions.remove(first[2]);
        assert!(may_begin(&executions, 2, true));
        executions.check_invariants();
    }

    #[test]
    fn executions_for_which_nobody_waits_count_for_all_clients() {
        for blocking in [true, false] {
            let config = ServiceConfig { asynchronous_max: BLOCKING_MAX, ..config() };
            let mut executions = Executions::default();
            let begin = |executions: &mut Executions, client: u64| {
                let client = Incarnation(client);
                let may_begin = executions.may_begin(&config, client, blocking);
                may_begin.then(|| executions.begin(client, 1, "f", blocking))
            };
            // Each client is lost and comes again under another name. Nothing returns.
            let mut abandoned = Vec::new();
            for client in 0..100 {
                while let Some(execution) = begin(&mut executions, client) {
                    executions.abandon(execution, None, 0);
                    abandoned.push(execution);
                    executions.check_invariants();
                }
                // A client that behaves has its place until all are taken.
                let other = begin(&mut executions, 1_000 + client);
                assert_eq!(other.is_some(), abandoned.len() < BLOCKING_MAX, "{client}");
                other.map(|other| executions.remove(other));
            }
            assert_eq!(abandoned.len(), BLOCKING_MAX);
            executions.remove(abandoned[0]);
            assert!(begin(&mut executions, 2_000).is_some(), "one has returned");
        }
    }

    #[test]
    fn a_function_keeps_its_thread_while_the_most_are_lent() {
        let config = config();
        let mut executions = Executions::default();
        let client = LENT_MAX as u64;
        let waits = || Some("an output".to_owned());
        let may_begin =
            |executions: &Executions| executions.may_begin(&config, Incarnation(client), true);
        let others: Vec<_> = (0..client).map(|other| begin(&mut executions, other)).collect();
        let last = begin(&mut executions, client);
        for &other in &others {
            executions.set_awaited(other, waits());
        }
        executions.set_awaited(last, waits());
        assert_eq!(executions.threads_lent, LENT_MAX);
        assert!(!may_begin(&executions), "it keeps the only thread of its client");
        // Nobody lends on its behalf once a place is left: it says again what it waits for.
        executions.remove(others[0]);
        assert!(!may_begin(&executions));
        executions.set_awaited(last, waits());
        assert!(may_begin(&executions));
        executions.check_invariants();
    }
}
