//! [`ClusterMeeting`]: the thread in which a task meets the others of its cluster at a rendezvous.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushpull::ClusterSpec;
use pushpull::cluster::rendezvous::{ClusterRendezvous, TaskRegistration};
use pushpull::cluster::resolve::RendezvousPlan;
use pushpull::error::{ListenError, RegisterError};
use pushpull::security::Credentials;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

/// A thread that registers a task, serves the rendezvous if the plan says so, and stays registered
/// until the process ends or [`ClusterMeeting::leave`] is called.
#[derive(Debug)]
pub(crate) struct ClusterMeeting {
    gathered: oneshot::Receiver<Result<GatheredCluster, MeetingError>>,
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// A cluster whose tasks have all registered, and the index of this task.
#[derive(Debug)]
pub(crate) struct GatheredCluster {
    pub(crate) cluster: ClusterSpec,
    pub(crate) index: u32,
}

/// The reason why a task has not met the others.
#[derive(Debug)]
pub(crate) enum MeetingError {
    /// This process cannot serve the rendezvous.
    Listen(ListenError),
    /// The cluster has not gathered, or refuses the task.
    Register(RegisterError),
    /// The system starts no thread, or no runtime in it.
    Thread(io::Error),
}

/// Who reaches the rendezvous that this process serves, and what it proves itself with there.
#[derive(Clone, Debug)]
pub(crate) struct MeetingAccess {
    /// Whether everybody may.
    pub(crate) insecure: bool,
    pub(crate) credentials: Option<Credentials>,
}

impl MeetingAccess {
    /// Returns whether other machines may reach it.
    pub(crate) fn is_open(&self) -> bool {
        self.insecure || self.credentials.as_ref().is_some_and(Credentials::protect)
    }
}

impl ClusterMeeting {
    /// Starts the thread. `access` says who reaches the rendezvous, and `line` prints a line about what
    /// the task waits for.
    ///
    /// # Errors
    /// [`MeetingError::Thread`].
    pub(crate) fn start(
        plan: RendezvousPlan,
        within: Duration,
        access: MeetingAccess,
        line: fn(&dyn Display),
    ) -> Result<ClusterMeeting, MeetingError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(MeetingError::Thread)?;
        let (told, gathered) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let run = move || {
            let meet = meet(plan, within, access, line, told, ended);
            LocalSet::new().block_on(&runtime, meet);
        };
        let thread = std::thread::Builder::new().name("pushpull-meeting".to_owned()).spawn(run);
        let thread = thread.map_err(MeetingError::Thread)?;
        Ok(ClusterMeeting { gathered, end, thread })
    }

    /// Waits until all tasks of the cluster have registered. Cancel-safe.
    ///
    /// # Errors
    /// Every [`MeetingError`].
    pub(crate) async fn gathered(&mut self) -> Result<GatheredCluster, MeetingError> {
        let ended = |_| Err(MeetingError::Thread(io::Error::other("the thread has ended")));
        (&mut self.gathered).await.unwrap_or_else(ended)
    }

    /// Ends the registration. A process that serves the rendezvous waits until the other tasks have
    /// ended theirs, at most [`LEAVE_TIMEOUT`].
    pub(crate) fn leave(self) {
        // The thread may have ended.
        let _ = self.end.send(());
        let _ = self.thread.join();
    }
}

async fn meet(
    plan: RendezvousPlan,
    within: Duration,
    access: MeetingAccess,
    line: fn(&dyn Display),
    told: oneshot::Sender<Result<GatheredCluster, MeetingError>>,
    ended: oneshot::Receiver<()>,
) {
    let mut served = None;
    if plan.is_here {
        match listen(&plan, within, &access).await {
            Ok(rendezvous) => {
                served = Some(tokio::task::spawn_local(rendezvous.serve(|_| ())));
            }
            Err(error) => {
                // Nobody waits for a process that has been interrupted.
                let _ = told.send(Err(MeetingError::Listen(error)));
                return;
            }
        }
    }
    let mut told = Some(told);
    let stay = stay_registered(&plan, within, access.credentials, line, &mut told);
    tokio::select! {
        () = stay => {}
        () = requested(ended) => {}
    }
    if let Some(served) = served {
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, served).await;
    }
}

/// Listens for the tasks. A predecessor that is exiting may hold the port.
async fn listen(
    plan: &RendezvousPlan,
    within: Duration,
    access: &MeetingAccess,
) -> Result<ClusterRendezvous, ListenError> {
    let begun = Instant::now();
    let is_open = access.is_open();
    let address = listen_address(&plan.address, is_open);
    loop {
        match ClusterRendezvous::listen(&address, plan.size, is_open) {
            Err(ListenError::InUse { .. }) if begun.elapsed() < HANDOVER_TIMEOUT.min(within) => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            listening => {
                let credentials = access.credentials.clone();
                return listening.map(|rendezvous| rendezvous.credentials(credentials));
            }
        }
    }
}

/// Returns the address to listen on. Many systems resolve their own name to an address of loopback,
/// which other machines do not reach.
fn listen_address(address: &str, insecure: bool) -> String {
    let own = || address.to_socket_addrs().map(|found| found.map(|it| it.ip()).collect::<Vec<_>>());
    match address.rsplit_once(':') {
        Some((host, port))
            if insecure && host != "localhost" && host.parse::<IpAddr>().is_err() =>
        {
            let is_local = own().is_ok_and(|own| own.iter().all(IpAddr::is_loopback));
            if is_local { format!("0.0.0.0:{port}") } else { address.to_owned() }
        }
        _ => address.to_owned(),
    }
}

/// Registers, and again whenever the connection to the rendezvous is lost: a process that serves it
/// and is started again gathers everybody a second time.
async fn stay_registered(
    plan: &RendezvousPlan,
    within: Duration,
    credentials: Option<Credentials>,
    line: fn(&dyn Display),
    told: &mut Option<oneshot::Sender<Result<GatheredCluster, MeetingError>>>,
) {
    let Some(registration) = TaskRegistration::new(plan) else { return };
    let mut registration = registration.credentials(credentials);
    let mut lines = WaitingLines { last: None, line };
    let mut own_index = None;
    loop {
        let is_first = told.is_some();
        let waits = |text: &str| {
            if is_first {
                lines.print(text)
            }
        };
        let mut registered = match (registration.register(within, waits).await, told.take()) {
            (Ok(registered), None) => {
                let (now, own) = (registered.index, own_index.unwrap_or(registered.index));
                if now != own {
                    line(&format_args!(
                        "the rendezvous was started again and numbers task {own} as {now}: start \
                         all tasks again, or give them --task-index"
                    ));
                }
                registered
            }
            (Ok(registered), Some(told)) => {
                let (cluster, index) = (registered.cluster.clone(), registered.index);
                own_index = Some(index);
                let _ = told.send(Ok(GatheredCluster { cluster, index }));
                registered
            }
            (Err(error), Some(told)) => {
                let _ = told.send(Err(MeetingError::Register(error)));
                return;
            }
            // The training needs no rendezvous any more; a process that starts again does.
            (Err(RegisterError::TimedOut { .. }), None) => continue,
            (Err(error), None) => {
                line(&format_args!("{error}"));
                return std::future::pending().await;
            }
        };
        if registered.displaced().await {
            return std::future::pending().await;
        }
    }
}

/// Completes once the end is requested. A meeting that is dropped lasts as long as its process.
async fn requested(ended: oneshot::Receiver<()>) {
    if ended.await.is_err() {
        std::future::pending().await
    }
}

/// Lines about what a task waits for: when that changes, and every [`LINE_INTERVAL`].
struct WaitingLines {
    last: Option<(Instant, String)>,
    line: fn(&dyn Display),
}

impl WaitingLines {
    fn print(&mut self, text: &str) {
        let is_known = self
            .last
            .as_ref()
            .is_some_and(|(printed, last)| text == last && printed.elapsed() < LINE_INTERVAL);
        if !is_known {
            (self.line)(&format_args!("waits for the cluster: {text}"));
            self.last = Some((Instant::now(), text.to_owned()));
        }
    }
}

const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The time that the rendezvous stays for the other tasks after this one has left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time to wait for the port of a predecessor.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(5);

const RETRY_PAUSE: Duration = Duration::from_millis(20);
