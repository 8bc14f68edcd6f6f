//! [`RankListener`]: where a rank takes the connections of others.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_net::{
    AcceptLimits, Endpoints, ListenError, Stream, StreamAddresses, accept, enter_private_folder,
};

use super::control::ControlConfig;
use super::door::{Door, DoorState};
use super::meeting::{self, Meeting};
use crate::error::RingError;
use crate::transport::Transport;

/// The sockets at which a rank listens: for its predecessor, and for members if it serves.
pub(super) struct RankListener {
    config: Rc<ControlConfig>,
    door: Rc<DoorState>,
    /// The addresses that are bound.
    bound: RefCell<Vec<String>>,
    is_listening: Cell<bool>,
    /// Whether this process listens at the address where the program meets.
    is_at_meeting: Cell<bool>,
}

impl RankListener {
    pub(super) fn new(config: Rc<ControlConfig>, door: Rc<DoorState>) -> RankListener {
        RankListener {
            config,
            door,
            bound: RefCell::default(),
            is_listening: Cell::new(false),
            is_at_meeting: Cell::new(false),
        }
    }

    /// Returns the first address of this rank.
    pub(super) fn own_address(&self) -> Option<String> {
        self.bound.borrow().first().cloned()
    }

    /// Binds what can be bound before the rendezvous is reached. Returns whether this rank is the one
    /// that serves it at an address.
    ///
    /// # Errors
    /// [`RingError::System`] if an address cannot be bound.
    pub(super) fn listen(&self) -> Result<bool, RingError> {
        match &self.config.meeting {
            Meeting::Folder(folder) => {
                let unix = self.enter(folder)?;
                let endpoints = match self.config.transport {
                    Some(Transport::Tcp) => unix.also(self.bind("127.0.0.1:0")?),
                    _ => unix,
                };
                self.accept(endpoints);
            }
            Meeting::Address(address) if self.may_serve_address() => {
                match Endpoints::bind(address, self.config.may_be_reached()) {
                    Ok(endpoints) => {
                        let endpoints = match self.config.transport {
                            Some(Transport::Tcp) => endpoints,
                            _ => endpoints.also(self.bind_shared_socket()?),
                        };
                        self.accept(endpoints);
                        self.is_at_meeting.set(true);
                    }
                    // Another process serves there.
                    Err(ListenError::InUse { .. } | ListenError::Elsewhere { .. }) => {}
                    Err(error) => return Err(not_bound(address, &error)),
                }
            }
            Meeting::Address(_) => {}
        }
        Ok(self.is_at_meeting.get())
    }

    /// Listens where the program meets, once the process that did is lost. Processes that are started
    /// again are served there, or told where the rendezvous is.
    pub(super) fn listen_at_meeting(&self) {
        let Meeting::Address(address) = &self.config.meeting else { return };
        if !self.is_at_meeting.get()
            && let Ok(endpoints) = Endpoints::bind(address, self.config.may_be_reached())
        {
            accept(
                endpoints,
                ACCEPT_LIMITS,
                self.config.credentials.clone(),
                Door(self.door.clone()),
            );
            self.is_at_meeting.set(true);
        }
    }

    /// Binds the addresses of this rank on the network of the connection to the rendezvous. Returns
    /// the addresses that others can use, if they have changed.
    ///
    /// # Errors
    /// [`RingError::System`] if an address cannot be bound.
    pub(super) fn listen_beside(&self, stream: &Stream) -> Result<Option<Vec<String>>, RingError> {
        let addresses = stream.addresses().map_err(|error| RingError::System {
            doing: "find the address of this rank".to_owned(),
            cause: error.to_string(),
        })?;
        let Some(StreamAddresses { local, .. }) = addresses else { return Ok(None) };
        if !self.is_listening.get() {
            let own = SocketAddr::new(local.ip(), 0).to_string();
            let endpoints = self.bind(&own)?;
            let endpoints = match self.config.transport {
                Some(Transport::Tcp) => endpoints,
                _ => endpoints.also(self.bind_shared_socket()?),
            };
            self.accept(endpoints);
        }
        Ok(Some(self.addresses(Some(local))))
    }

    fn bind(&self, address: &str) -> Result<Endpoints, RingError> {
        Endpoints::bind(address, self.config.may_be_reached())
            .map_err(|error| not_bound(address, &error))
    }

    /// Returns whether this rank serves an address of its host.
    ///
    /// Any rank may be on that host, for launchers place rank 0 as they like. But if an elastic ring
    /// has lost the process that served the address, a rank that is started again there would form
    /// a second ring.
    fn may_serve_address(&self) -> bool {
        let needs_all = self.config.first_size_min == self.config.facts.size;
        needs_all || self.config.facts.index.unwrap_or(0) == 0
    }

    /// Binds a socket in the private folder of a job.
    fn enter(&self, folder: &Path) -> Result<Endpoints, RingError> {
        let address = format!("unix:{}", self.socket(folder).display());
        let mut tries = 0;
        loop {
            enter_private_folder(folder).map_err(|error| RingError::System {
                doing: format!("meet in {}", folder.display()),
                cause: error.to_string(),
            })?;
            let bound = self.bind(&address);
            tries += 1;
            // The last rank of a ring before may have removed the folder since.
            if bound.is_ok() || folder.exists() || tries == ENTER_TRIES_MAX {
                return bound;
            }
        }
    }

    /// Returns the path of this rank's socket in the private folder of a job.
    pub(super) fn socket(&self, folder: &Path) -> PathBuf {
        meeting::socket(folder, self.config.facts.incarnation.0)
    }

    /// Returns the path of this rank's socket in the folder that all jobs of this host share.
    pub(super) fn shared_socket(&self) -> PathBuf {
        let name = format!("pushpull-rank-{:016x}.sock", self.config.socket);
        self.config.socket_folder.join(name)
    }

    fn bind_shared_socket(&self) -> Result<Endpoints, RingError> {
        self.bind(&format!("unix:{}", self.shared_socket().display()))
    }

    fn accept(&self, endpoints: Endpoints) {
        self.bound.borrow_mut().extend(endpoints.addresses());
        accept(endpoints, ACCEPT_LIMITS, self.config.credentials.clone(), Door(self.door.clone()));
        self.is_listening.set(true);
    }

    /// Returns the addresses that others can use. `local` is that of this host in their network.
    pub(super) fn addresses(&self, local: Option<SocketAddr>) -> Vec<String> {
        let mut bound = self.bound.borrow_mut();
        for address in bound.iter_mut() {
            let parsed = address.parse::<SocketAddr>().ok();
            if let (Some(own), Some(local)) = (parsed.filter(|at| at.ip().is_unspecified()), local)
            {
                *address = SocketAddr::new(local.ip(), own.port()).to_string();
            }
        }
        let mut named = bound.clone();
        if self.config.transport == Some(Transport::Tcp) {
            named.retain(|address| !address.starts_with("unix:"));
        } else {
            // The shorter way first.
            named.sort_by_key(|address| !address.starts_with("unix:"));
        }
        named
    }
}

fn not_bound(address: &str, error: &ListenError) -> RingError {
    RingError::System { doing: format!("listen at {address}"), cause: Chain(error).to_string() }
}

/// The limits of connections that have not said hello.
const ACCEPT_LIMITS: AcceptLimits =
    AcceptLimits { handshake_timeout: Duration::from_secs(10), waiting_connections_max: 256 };

/// How often a rank enters a folder that others remove.
const ENTER_TRIES_MAX: u32 = 10;
