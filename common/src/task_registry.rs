//! [`TaskRegistry`]: gathers the addresses of a cluster's tasks, and gives each task its index.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::access::AccessEvent;
use crate::cluster::{AddressProblem, ClusterSize, ClusterSpec, canonical, index_list};
use crate::identity::Identity;
use crate::ids::{ClientEpoch, TaskId};
use crate::protocol::message::{
    ClusterIs, ClusterWaits, Hello, Refused, RegisterTask, Role, TaskKey,
};
use crate::protocol::refusal::Detail;
use crate::protocol::wire::Text;
use crate::protocol::{Features, Message, Refusal, limits};

/// Returns the facts on which all tasks of a cluster of this size agree.
pub fn identity(size: ClusterSize) -> Identity {
    let facts = Identity::new().with_protocol();
    let facts = facts.with("num_ps", size.num_ps().to_string());
    facts.with("num_workers", size.num_workers().to_string())
}

/// An input of a [`TaskRegistry`].
#[derive(Clone, Debug)]
pub enum RegistryInput {
    /// A task asks for the cluster, over a connection that has asked for nothing before.
    Register {
        /// The number of the connection.
        connection: u64,
        /// Its hello.
        hello: Box<Hello>,
        /// The request.
        task: RegisterTask,
    },
    /// A connection has ended.
    Closed {
        /// Its number.
        connection: u64,
    },
    /// The time has come to tell the tasks that wait whom they wait for.
    Report,
}

/// An output of a [`TaskRegistry`].
#[derive(Clone, Debug, PartialEq)]
pub enum RegistryOutput {
    /// Send a message, with a body if it is not empty.
    Send {
        /// The number of the connection.
        connection: u64,
        /// The message.
        message: Box<Message>,
        /// The body.
        body: Arc<str>,
    },
    /// Close a connection once all has been sent.
    Close {
        /// The number of the connection.
        connection: u64,
    },
    /// Tell the process of the rendezvous.
    Event(RendezvousEvent),
}

/// An event at a rendezvous. It displays as a line.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RendezvousEvent {
    /// Tasks are missing: reported again and again.
    Waits(ClusterWaits),
    /// All tasks have registered for the first time.
    Gathered(ClusterSpec),
    /// A task has registered again, maybe at another address.
    Returned(TaskId),
    /// A task was refused.
    Refused {
        /// The task, in words.
        task: String,
        /// The reason.
        refusal: Refusal,
    },
    /// Something about who may connect.
    Access(AccessEvent),
}

impl fmt::Display for RendezvousEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RendezvousEvent::Waits(waits) => waits.fmt(f),
            RendezvousEvent::Gathered(cluster) => write!(f, "all tasks have registered: {cluster}"),
            RendezvousEvent::Returned(task) => write!(f, "{task} has registered again"),
            RendezvousEvent::Access(event) => event.fmt(f),
            RendezvousEvent::Refused { task, refusal } => write!(f, "refused {task}: {refusal}"),
        }
    }
}

impl fmt::Display for ClusterWaits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClusterWaits { registered, tasks, missing } = self;
        write!(f, "{registered} of {tasks} tasks have registered; missing: {missing}")
    }
}

/// The tasks of a cluster that register at its rendezvous.
///
/// A task registers its job, its key and its address. It waits until all tasks of all jobs have
/// registered, and is told by each [`RegistryInput::Report`] who is missing. Then each learns the
/// cluster and its own index. A task that registers again later learns the cluster at once.
///
/// # Invariants
///
/// - A job never has more tasks than its size. Before all have registered, each has a connection.
/// - No two tasks share a key, a connection or an address.
/// - A task keeps its index. Another id gets it only after the connection of the task has ended.
/// - The cluster is that of the newest address of each task.
/// - A refused task has changed nothing.
#[derive(Debug)]
pub struct TaskRegistry {
    size: ClusterSize,
    ps: BTreeMap<TaskKey, TaskEntry>,
    workers: BTreeMap<TaskKey, TaskEntry>,
    /// The cluster, once all tasks have registered.
    cluster: Option<ClusterSpec>,
    outputs: VecDeque<RegistryOutput>,
}

/// A task that has registered.
#[derive(Debug)]
struct TaskEntry {
    address: String,
    connection: Option<u64>,
    /// The index, once all tasks have registered.
    index: Option<u32>,
}

/// The two jobs of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatheredJob {
    Ps,
    Worker,
}

impl GatheredJob {
    const ALL: [GatheredJob; 2] = [GatheredJob::Ps, GatheredJob::Worker];

    fn name(self) -> &'static str {
        match self {
            GatheredJob::Ps => TaskId::PS_JOB,
            GatheredJob::Worker => "worker",
        }
    }

    fn called(name: &str) -> Option<GatheredJob> {
        GatheredJob::ALL.into_iter().find(|job| job.name() == name)
    }
}

impl fmt::Display for TaskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskKey::Index { index } => index.fmt(f),
            TaskKey::Id { id } => write!(f, "{:?}", id.as_str()),
        }
    }
}

impl TaskRegistry {
    /// Creates the registry of a cluster of this size.
    pub fn new(size: ClusterSize) -> TaskRegistry {
        TaskRegistry {
            size,
            ps: BTreeMap::new(),
            workers: BTreeMap::new(),
            cluster: None,
            outputs: VecDeque::new(),
        }
    }

    /// Takes an input.
    pub fn handle(&mut self, input: RegistryInput) {
        match input {
            RegistryInput::Register { connection, hello, task } => {
                if let Err(refusal) = self.register(connection, &hello, &task) {
                    // A stranger chooses these texts, which are printed.
                    let (job, address) = (task.job.as_str(), task.address.as_str());
                    let (job, address) = (job.escape_debug(), address.escape_debug());
                    let text = format!("{job} {} at {address}", task.key);
                    self.refuse(connection, refusal.clone());
                    self.tell(RendezvousEvent::Refused { task: text, refusal });
                }
            }
            RegistryInput::Closed { connection } => self.close(connection),
            RegistryInput::Report => self.report(),
        }
    }

    /// Returns the next output.
    pub fn poll_output(&mut self) -> Option<RegistryOutput> {
        self.outputs.pop_front()
    }

    /// Returns whether all tasks have registered, and the connections of all have ended since.
    pub fn is_done(&self) -> bool {
        self.cluster.is_some() && self.connections().next().is_none()
    }

    /// # Errors
    /// The refusal of a task that changes nothing.
    fn register(
        &mut self,
        connection: u64,
        hello: &Hello,
        task: &RegisterTask,
    ) -> Result<(), Refusal> {
        hello.agree(Features::ALL)?;
        if hello.role != (Role::Task {}) {
            let kind = Message::from(task.clone()).kind();
            return Err(Refusal::Role { role: hello.role.code(), kind });
        }
        let theirs = Identity::from_wire(&hello.identity);
        identity(self.size).refusal(&theirs).map_or(Ok(()), Err)?;
        let Some(job) = GatheredJob::called(task.job.as_str()) else {
            return Err(unsupported(task, "the jobs of the cluster are ps and worker".to_owned()));
        };
        let holder = self.check_address(job, task)?;
        let place = self.find_place(job, &task.key, holder.as_ref())?;
        let holder = holder
            .filter(|holder| place.as_ref().map(|key| (job, key)) != Some((holder.0, &holder.1)));
        let left = place.as_ref().and_then(|key| self.tasks(job).get(key));
        let left = left.map(|former| former.address.clone());
        let left = left.filter(|left| left != ClusterSpec::NO_ADDRESS);
        if let (Some((_, key)), None) = (&holder, &left) {
            return Err(unsupported(task, format!("{} is the address of {key}", task.address)));
        }
        let former = place.and_then(|key| self.tasks_mut(job).remove(&key));
        // The lost task registers its own address when it returns. Until then it has a free one.
        if let Some(((lost_job, key), left)) = holder.zip(left)
            && let Some(lost) = self.tasks_mut(lost_job).get_mut(&key)
        {
            lost.address = left;
        }
        let address = task.address.as_str().to_owned();
        let index = former.as_ref().and_then(|former| former.index);
        let new = TaskEntry { address, connection: Some(connection), index };
        self.tasks_mut(job).insert(task.key.clone(), new);
        if let Some(older) = former.and_then(|former| former.connection) {
            // Epochs are those of clients of servers: of two processes the newer one stays.
            let (epoch, current) = (ClientEpoch(1), ClientEpoch(2));
            self.refuse(older, Refusal::Fenced { epoch, current });
        }
        self.answer(connection, index.map(|index| TaskId::new(job.name(), index)));
        Ok(())
    }

    /// Tells a task that has registered what it waits for, or the cluster. `returned` is a task that
    /// had an index before.
    fn answer(&mut self, connection: u64, returned: Option<TaskId>) {
        let is_new = returned.is_none();
        if let Some(task) = returned {
            self.tell(RendezvousEvent::Returned(task));
        }
        if !self.is_complete() {
            let message = self.waits();
            return self.send(connection, message);
        }
        if is_new {
            self.assign_indices();
        }
        self.cluster = self.build();
        let Some(cluster) = self.cluster.clone() else { return };
        let told: Vec<_> = match is_new {
            true => self.connections().collect(),
            false => self.connections().filter(|(other, _)| *other == connection).collect(),
        };
        if is_new {
            self.tell(RendezvousEvent::Gathered(cluster.clone()));
        }
        let text: Arc<str> = cluster.to_string().into();
        for (connection, index) in told {
            let message = Box::new(ClusterIs { index: index.unwrap_or_default() }.into());
            let body = text.clone();
            self.outputs.push_back(RegistryOutput::Send { connection, message, body });
        }
    }

    /// Returns the task that has the address, if its connection has ended.
    ///
    /// # Errors
    /// The refusal of an address that no cluster takes, or that a task with a connection has.
    fn check_address(
        &self,
        job: GatheredJob,
        task: &RegisterTask,
    ) -> Result<Option<(GatheredJob, TaskKey)>, Refusal> {
        let address = task.address.as_str();
        let own = match (address, job) {
            (ClusterSpec::NO_ADDRESS, GatheredJob::Worker) => return Ok(None),
            (ClusterSpec::NO_ADDRESS, GatheredJob::Ps) => Err(AddressProblem::Absent),
            (address, _) => canonical(address),
        };
        let own = match own {
            Ok(own) => own,
            Err(problem) => return Err(unsupported(task, format!("{address:?}: {problem}"))),
        };
        for other in GatheredJob::ALL {
            let mut others = self.tasks(other).iter();
            let holder = others.find(|(key, registered)| {
                (other != job || **key != task.key)
                    && canonical(&registered.address).is_ok_and(|address| address == own)
            });
            match holder {
                None => {}
                Some((key, TaskEntry { connection: None, .. })) => {
                    return Ok(Some((other, key.clone())));
                }
                Some((key, _)) => {
                    let detail = format!("{address} is the address of {} {key}", other.name());
                    return Err(unsupported(task, detail));
                }
            }
        }
        Ok(None)
    }

    /// Returns the task whose place this one takes, if there is one: that of its key, or a lost one.
    /// Of several lost ones it is that of its address.
    ///
    /// # Errors
    /// The refusal of a task for which there is no place.
    fn find_place(
        &self,
        job: GatheredJob,
        key: &TaskKey,
        holder: Option<&(GatheredJob, TaskKey)>,
    ) -> Result<Option<TaskKey>, Refusal> {
        let size = self.size_of(job);
        if let TaskKey::Index { index } = key
            && *index >= size
        {
            let detail = Detail::clipped(format!("the job has {size} tasks"));
            return Err(Refusal::UnknownTask {
                job: Text::clipped(job.name()),
                task: *index,
                detail,
            });
        }
        let tasks = self.tasks(job);
        if tasks.contains_key(key) {
            return Ok(Some(key.clone()));
        }
        if tasks.len() < size as usize {
            return Ok(None);
        }
        let is_free = |(other, registered): &(&TaskKey, &TaskEntry)| {
            registered.connection.is_none()
                && matches!((key, other), (TaskKey::Id { .. }, TaskKey::Id { .. }))
        };
        let is_other =
            |key: &TaskKey| holder.is_none_or(|(of, holder)| (*of, holder) != (job, key));
        let lost = tasks.iter().filter(is_free);
        match lost.min_by_key(|&(key, registered)| (is_other(key), registered.index)) {
            Some((lost, _)) => Ok(Some(lost.clone())),
            None => {
                let what = Detail::clipped(format!("tasks of the job {}", job.name()));
                Err(Refusal::Busy { what, limit: size.into() })
            }
        }
    }

    fn close(&mut self, connection: u64) {
        let is_gathered = self.cluster.is_some();
        for job in GatheredJob::ALL {
            self.tasks_mut(job).retain(|_, task| {
                let is_closed = task.connection == Some(connection);
                task.connection = task.connection.filter(|_| !is_closed);
                is_gathered || !is_closed
            });
        }
    }

    fn report(&mut self) {
        if self.cluster.is_none() {
            let waits = self.waits();
            for (connection, _) in self.connections().collect::<Vec<_>>() {
                self.send(connection, waits.clone());
            }
            self.tell(RendezvousEvent::Waits(waits));
        }
    }

    /// Returns the message for tasks that wait.
    fn waits(&self) -> ClusterWaits {
        let registered = (self.ps.len() + self.workers.len()) as u32;
        let missing = GatheredJob::ALL.into_iter().filter_map(|job| self.missing_of(job));
        let missing = Detail::clipped(missing.collect::<Vec<_>>().join(", "));
        ClusterWaits { registered, tasks: self.size.tasks(), missing }
    }

    /// Returns the missing tasks of a job in words: their indices if all others have registered by
    /// theirs, or else their number.
    fn missing_of(&self, job: GatheredJob) -> Option<String> {
        let tasks = self.tasks(job);
        let missing = self.size_of(job) - tasks.len() as u32;
        let has_ids = tasks.keys().any(|key| matches!(key, TaskKey::Id { .. }));
        match (missing, has_ids) {
            (0, _) => None,
            (missing, true) => Some(format!("{missing} of the job {}", job.name())),
            (_, false) => {
                let indices = (0..self.size_of(job))
                    .filter(|&index| !tasks.contains_key(&TaskKey::Index { index }));
                Some(format!("{} {}", job.name(), index_list(indices)))
            }
        }
    }

    /// Gives each task its index: that of its key, or the next free one in the order of the ids.
    fn assign_indices(&mut self) {
        for job in GatheredJob::ALL {
            let free = (0..self.size_of(job))
                .filter(|&index| !self.tasks(job).contains_key(&TaskKey::Index { index }));
            let mut free = free.collect::<VecDeque<_>>();
            for (key, task) in self.tasks_mut(job) {
                task.index = match key {
                    TaskKey::Index { index } => Some(*index),
                    TaskKey::Id { .. } => free.pop_front(),
                };
            }
        }
    }

    fn build(&self) -> Option<ClusterSpec> {
        let mut builder = ClusterSpec::builder();
        for job in GatheredJob::ALL.into_iter().filter(|&job| self.size_of(job) > 0) {
            let tasks = self.tasks(job).values();
            let tasks = tasks.filter_map(|task| Some((task.index?, &*task.address)));
            builder = builder.sparse_job(job.name(), tasks);
        }
        // Addresses and indices were checked one by one.
        builder.build().ok()
    }

    fn is_complete(&self) -> bool {
        self.waits().registered == self.size.tasks()
    }

    fn send(&mut self, connection: u64, message: impl Into<Message>) {
        let message = Box::new(message.into());
        self.outputs.push_back(RegistryOutput::Send { connection, message, body: "".into() });
    }

    fn tell(&mut self, event: RendezvousEvent) {
        self.outputs.push_back(RegistryOutput::Event(event));
    }

    fn refuse(&mut self, connection: u64, refusal: Refusal) {
        self.send(connection, Refused { refusal });
        self.outputs.push_back(RegistryOutput::Close { connection });
    }

    /// Returns the open connections, each with the index of its task.
    fn connections(&self) -> impl Iterator<Item = (u64, Option<u32>)> {
        let all = self.ps.values().chain(self.workers.values());
        all.filter_map(|task| Some((task.connection?, task.index)))
    }

    fn size_of(&self, job: GatheredJob) -> u32 {
        match job {
            GatheredJob::Ps => self.size.num_ps(),
            GatheredJob::Worker => self.size.num_workers(),
        }
    }

    fn tasks(&self, job: GatheredJob) -> &BTreeMap<TaskKey, TaskEntry> {
        match job {
            GatheredJob::Ps => &self.ps,
            GatheredJob::Worker => &self.workers,
        }
    }

    fn tasks_mut(&mut self, job: GatheredJob) -> &mut BTreeMap<TaskKey, TaskEntry> {
        match job {
            GatheredJob::Ps => &mut self.ps,
            GatheredJob::Worker => &mut self.workers,
        }
    }
}

fn unsupported(task: &RegisterTask, detail: String) -> Refusal {
    let kind = Message::from(task.clone()).kind();
    Refusal::Unsupported { kind, detail: Detail::shortened(detail) }
}

const _: () = assert!(limits::TASK_ADDRESS_BYTES_MAX == ClusterSpec::ADDRESS_BYTES_MAX);
const _: () = assert!(limits::GATHERED_TASKS_MAX == ClusterSize::TASKS_MAX);

#[cfg(test)]
mod tests;
