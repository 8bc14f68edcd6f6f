//! [`TaskRegistration`]: a task that asks a rendezvous for its cluster.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pushpull_common::cluster::resolve::{RegisteringTask, RendezvousPlan};
use pushpull_common::cluster::{ClusterSize, ClusterSpec};
use pushpull_common::error::Chain;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{
    BodyCrc, ClusterWaits, FeatureOffer, Hello, RegisterTask, Role, TaskKey,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Message, Refusal, encode, version,
};
use pushpull_common::task_registry::identity;
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::auth::{Credentials, ProofError, say_hello};
use crate::{Connector, FrameStream, Stream};

/// A task that registers at the rendezvous of its cluster.
#[derive(Debug)]
pub struct TaskRegistration {
    connector: Connector,
    credentials: Option<Credentials>,
    size: ClusterSize,
    task: RegisteringTask,
    incarnation: Incarnation,
    held: Option<HeldPort>,
    /// Whether the cluster has gathered once.
    has_registered: bool,
}

/// A cluster that has gathered, with the connection of this task to its rendezvous. The rendezvous
/// counts the task as running while the connection is open.
#[derive(Debug)]
pub struct RegisteredTask {
    /// The cluster.
    pub cluster: ClusterSpec,
    /// The index of this task in its job.
    pub index: u32,
    frames: FrameStream,
}

/// The reason why a task did not learn its cluster.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Some tasks have not registered in time, the rendezvous was not reached, or it had no place for
    /// this task.
    #[error("cannot gather the cluster at {rendezvous} within {within:?}: {waited}")]
    TimedOut {
        /// The address of the rendezvous.
        rendezvous: String,
        /// The time.
        within: Duration,
        /// The tasks that are missing, or the reason why the rendezvous was not reached.
        waited: String,
    },
    /// The rendezvous gathers another cluster, or is of another build.
    #[error(
        "cannot join the cluster at {rendezvous}: {fact} is {theirs:?} there, and {ours:?} in this \
         process"
    )]
    Disagreement {
        /// The address of the rendezvous.
        rendezvous: String,
        /// The name of the fact that differs, such as `num_workers`.
        fact: String,
        /// Its value at the rendezvous.
        theirs: String,
        /// Its value in this process.
        ours: String,
    },
    /// The rendezvous refuses the task.
    #[error("cannot join the cluster at {rendezvous}: {refusal}")]
    Refused {
        /// The address of the rendezvous.
        rendezvous: String,
        /// The reason.
        refusal: Refusal,
    },
    /// No port is left on this host.
    #[error("cannot take a port of {host}")]
    Port {
        /// The address of this host.
        host: IpAddr,
        /// The error of the system.
        source: io::Error,
    },
}

/// The end of one attempt to register.
enum AttemptEnd {
    Registered(Box<RegisteredTask>),
    Failed(RegisterError),
    /// The rendezvous was not reached or was lost: another attempt may succeed.
    Lost,
}

impl TaskRegistration {
    /// Creates the registration of a task; `None` if the plan has none. Nothing is connected yet.
    pub fn new(plan: &RendezvousPlan) -> Option<TaskRegistration> {
        Some(TaskRegistration {
            connector: Connector::new(&plan.address),
            credentials: None,
            size: plan.size,
            task: plan.task.clone()?,
            incarnation: Incarnation(RandomState::new().build_hasher().finish()),
            held: None,
            has_registered: false,
        })
    }

    /// Registers with these credentials. Default: none.
    #[must_use]
    pub fn credentials(self, credentials: Option<Credentials>) -> TaskRegistration {
        let connector = self.connector.credentials(credentials.clone());
        TaskRegistration { connector, credentials, ..self }
    }

    /// Registers the task, and waits for all others. Retries until the deadline, because processes
    /// start in any order and a lost task may still hold a place. `on_wait` is told in words what it
    /// waits for, every few seconds.
    ///
    /// # Errors
    /// Every [`RegisterError`].
    pub async fn register(
        &mut self,
        within: Duration,
        mut on_wait: impl FnMut(&str),
    ) -> Result<RegisteredTask, RegisterError> {
        let deadline = Instant::now() + within;
        let mut waited = "nothing was tried".to_owned();
        // A task that has learned its cluster needs the rendezvous for others alone.
        let pause_max = if self.has_registered { LATE_PAUSE_MAX } else { PAUSE_MAX };
        let mut pause = RETRY_PAUSE;
        loop {
            let attempt = self.attempt(&mut waited, &mut on_wait);
            match timeout_at(deadline, attempt).await {
                Ok(AttemptEnd::Registered(registered)) => {
                    self.has_registered = true;
                    return Ok(*registered);
                }
                Ok(AttemptEnd::Failed(error)) => return Err(error),
                Ok(AttemptEnd::Lost) if Instant::now() + pause < deadline => {
                    on_wait(&waited);
                    sleep(pause).await;
                    pause = (pause * 2).min(pause_max);
                }
                Ok(AttemptEnd::Lost) | Err(_) => {
                    let rendezvous = self.connector.address().to_owned();
                    return Err(RegisterError::TimedOut { rendezvous, within, waited });
                }
            }
        }
    }

    async fn attempt(&mut self, waited: &mut String, on_wait: &mut impl FnMut(&str)) -> AttemptEnd {
        let connected = match self.connector.connect(Connector::LIMIT).await {
            Ok(connected) => connected,
            Err(error) => {
                *waited = format!("the rendezvous is not reached: {}", Chain(&error));
                return AttemptEnd::Lost;
            }
        };
        let address = match self.own_address(&connected.stream) {
            Ok(address) => address,
            Err(error) => return AttemptEnd::Failed(error),
        };
        let mut frames = FrameStream::new(connected.stream, FrameReader::new());
        let request = self.request(&address);
        let told = |waits: ClusterWaits| {
            *waited = waits.to_string();
            on_wait(waited);
        };
        match converse(&mut frames, self.credentials.as_ref(), request, told).await {
            Ok(Answer::Cluster(cluster, index)) => {
                AttemptEnd::Registered(Box::new(RegisteredTask { cluster, index, frames }))
            }
            // The rendezvous may not know yet that another task is lost.
            Ok(Answer::Refused(refusal @ Refusal::Busy { .. })) => {
                *waited = refusal.to_string();
                AttemptEnd::Lost
            }
            Ok(Answer::Refused(refusal)) => AttemptEnd::Failed(self.refused(refusal)),
            Err(reason) => {
                *waited = format!("the connection to the rendezvous is lost: {reason}");
                AttemptEnd::Lost
            }
        }
    }

    /// Returns the address at which others reach the task.
    fn own_address(&mut self, stream: &Stream) -> Result<String, RegisterError> {
        let Some(port) = self.task.port else { return Ok(ClusterSpec::NO_ADDRESS.to_owned()) };
        let addresses = stream.addresses().ok().flatten();
        let host = addresses.map(|addresses| addresses.local.ip().to_canonical());
        let host = host.unwrap_or(IpAddr::from([127, 0, 0, 1]));
        let port = match (port, &self.held) {
            (0, Some(held)) => held.port,
            (0, None) => {
                let held = HeldPort::take(host);
                let held = held.map_err(|source| RegisterError::Port { host, source })?;
                self.held.insert(held).port
            }
            (port, _) => port,
        };
        Ok(match (&self.task.host, self.name_of_this_host(host)) {
            (Some(host), _) => format!("{host}:{port}"),
            (None, Some(name)) => format!("{name}:{port}"),
            (None, None) => SocketAddr::new(host, port).to_string(),
        })
    }

    /// Returns the name by which others reach the host of the rendezvous, if this process is on it: it
    /// has reached the name over loopback.
    fn name_of_this_host(&self, own: IpAddr) -> Option<&str> {
        let (host, _) = self.connector.address().rsplit_once(':')?;
        let is_name =
            host != "localhost" && !host.starts_with('[') && host.parse::<IpAddr>().is_err();
        (own.is_loopback() && is_name).then_some(host)
    }

    /// Returns the hello and the request.
    fn request(&self, address: &str) -> (Hello, RegisterTask) {
        let key = match (self.task.index, &self.task.id) {
            (Some(index), _) => TaskKey::Index { index },
            (None, Some(id)) => TaskKey::Id { id: Text::clipped(&**id) },
            (None, None) => {
                TaskKey::Id { id: Text::clipped(format!("{:016x}", self.incarnation.0)) }
            }
        };
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Task {},
            job: Text::clipped(&*self.task.job),
            // What it proves to be. One with an id is any task of its job.
            task: self.task.index.unwrap_or(u32::MAX),
            shard: ShardId { task: 0, shard: 0 },
            incarnation: self.incarnation,
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_step: GlobalStep(0),
            seen_arena: 0,
            catalogue: None,
            body_crc: BodyCrc::Off {},
            identity: identity(self.size).to_wire(),
            auth: Default::default(),
            features: FeatureOffer::default(),
        };
        let request = RegisterTask {
            job: Text::clipped(&*self.task.job),
            key,
            address: Text::clipped(address),
        };
        (hello, request)
    }

    fn refused(&self, refusal: Refusal) -> RegisterError {
        let rendezvous = self.connector.address().to_owned();
        match refusal {
            Refusal::Identity { field, server, client, .. } => RegisterError::Disagreement {
                rendezvous,
                fact: field.as_str().to_owned(),
                theirs: server.as_str().to_owned(),
                ours: client.as_str().to_owned(),
            },
            refusal => RegisterError::Refused { rendezvous, refusal },
        }
    }
}

impl RegisteredTask {
    /// Waits until the connection ends. Returns whether another process has registered under the key
    /// of this task: to register again would displace that one.
    pub async fn displaced(&mut self) -> bool {
        loop {
            match self.frames.next().await {
                Ok((_, Message::Refused(_))) => return true,
                Ok((header, _)) if header.body_bytes == 0 => {}
                Ok(_) | Err(_) => return false,
            }
        }
    }
}

/// The last answer of a rendezvous to a task.
enum Answer {
    Cluster(ClusterSpec, u32),
    Refused(Refusal),
}

/// Sends a request, and reads what the rendezvous says until its last answer.
///
/// # Errors
/// The reason in words why there is none.
async fn converse(
    frames: &mut FrameStream,
    credentials: Option<&Credentials>,
    (hello, request): (Hello, RegisterTask),
    mut told: impl FnMut(ClusterWaits),
) -> Result<Answer, String> {
    let envelope = Envelope::default();
    let greeting = say_hello(frames, credentials, envelope, hello);
    let greeted = timeout(SILENCE_MAX, greeting).await;
    match greeted.map_err(|_| format!("it has been silent for {SILENCE_MAX:?}"))? {
        Ok(()) => {}
        Err(ProofError::Refused { refusal }) => return Ok(Answer::Refused(refusal)),
        Err(error) => return Err(Chain(&error).to_string()),
    }
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, &request.into(), BodyStamp::NONE);
    frames.send(&frame).await.map_err(|error| error.to_string())?;
    loop {
        let next = timeout(SILENCE_MAX, frames.next()).await;
        let next = next.map_err(|_| format!("it has been silent for {SILENCE_MAX:?}"))?;
        let (header, message) = next.map_err(|error| Chain(&error).to_string())?;
        match message {
            Message::ClusterWaits(waits) => told(waits),
            Message::Refused(refused) => return Ok(Answer::Refused(refused.refusal)),
            // The header has been checked: the body is within its limit.
            Message::ClusterIs(is) if header.body_bytes > 0 => {
                let mut body = vec![0; header.body_bytes as usize];
                let read = timeout(SILENCE_MAX, frames.body(&mut body)).await;
                let read = read.map_err(|_| "the cluster has not arrived".to_owned())?;
                read.map_err(|error| Chain(&error).to_string())?;
                let cluster = String::from_utf8_lossy(&body).parse();
                let cluster = cluster.map_err(|error| format!("it sends no cluster: {error}"))?;
                return Ok(Answer::Cluster(cluster, is.index));
            }
            other => return Err(format!("it sends a {}", other.name())),
        }
    }
}

/// A free port, held by a socket that is bound and does not listen.
///
/// A server with `SO_REUSEADDR` can listen on it, and the system gives it to nobody who asks for any
/// free port.
#[derive(Debug)]
struct HeldPort {
    port: u16,
    _socket: Socket,
}

impl HeldPort {
    fn take(host: IpAddr) -> io::Result<HeldPort> {
        let any = SocketAddr::new(host, 0);
        let socket = Socket::new(Domain::for_address(any), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&any.into())?;
        let bound = socket.local_addr()?.as_socket();
        let port = bound.ok_or(io::ErrorKind::AddrNotAvailable)?.port();
        Ok(HeldPort { port, _socket: socket })
    }
}

/// The first pause before the rendezvous is tried again. Each is twice as long as the one before.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause of a task that waits for its cluster.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The longest pause of a task that has learned its cluster.
const LATE_PAUSE_MAX: Duration = Duration::from_secs(10);

/// The longest time for which a rendezvous says nothing to a task that waits: several reports.
const SILENCE_MAX: Duration = Duration::from_secs(15);
