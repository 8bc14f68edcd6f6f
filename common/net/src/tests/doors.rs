//! Who gets through the door of a server, over real sockets: tokens, certificates, and what those
//! who do not are told.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{BodyCrc, Heartbeat, HeartbeatAnswer, Hello, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, encode, version};
use tokio::task::LocalSet;

use crate::auth::{CredentialFiles, Credentials, DeniedPeer, ProvenPeer, say_hello};
use crate::{
    AcceptLimits, ArrivedPeer, Connector, Endpoints, FrameStream, NoHello, PeerReceiver, Stream,
    accept,
};

const TRAINERS: &str = "00112233445566778899aabbccddeeff";
const OTHERS: &str = "ffeeddccbbaa99887766554433221100";

/// What a door has seen.
#[derive(Clone, Default)]
struct Seen {
    proven: Rc<RefCell<Vec<Option<ProvenPeer>>>>,
    denied: Rc<RefCell<Vec<DeniedPeer>>>,
    without: Rc<RefCell<Vec<NoHello>>>,
}

impl PeerReceiver for Seen {
    async fn take(&self, peer: ArrivedPeer) {
        self.proven.borrow_mut().push(peer.proven.clone());
        let stream = Stream::attach(peer.stream).unwrap();
        let mut frames = FrameStream::new(stream, peer.reader);
        frames.open();
        // The answer to the hello, and to each heartbeat.
        loop {
            let mut frame = Vec::new();
            encode(&mut frame, &Envelope::default(), &answer(), BodyStamp::NONE);
            if frames.send(&frame).await.is_err() || frames.next().await.is_err() {
                return;
            }
        }
    }

    fn no_hello(&self, reason: NoHello) {
        self.without.borrow_mut().push(reason);
    }

    fn denied(&self, peer: DeniedPeer) {
        self.denied.borrow_mut().push(peer);
    }
}

fn answer() -> Message {
    HeartbeatAnswer {}.into()
}

/// Runs a test beside the door of a server with these credentials.
fn with_door<T>(
    credentials: Option<Credentials>,
    test: impl AsyncFnOnce(&Seen, SocketAddr) -> T,
) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = Seen::default();
    LocalSet::new().block_on(&runtime, async {
        let endpoints = Endpoints::bind("127.0.0.1:0", false).unwrap();
        let address = endpoints.address().parse().unwrap();
        let limits = AcceptLimits {
            handshake_timeout: Duration::from_secs(20),
            waiting_connections_max: 16,
        };
        accept(endpoints, limits, credentials, seen.clone());
        test(&seen, address).await
    })
}

fn hello(role: Role, task: &TaskId) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role,
        job: Text::clipped(&*task.job),
        task: task.index,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: List::default(),
        auth: None,
        features: Default::default(),
    }
}

/// Connects, says hello, and has a heartbeat answered.
async fn visit(
    address: SocketAddr,
    credentials: Option<&Credentials>,
    role: Role,
    task: &TaskId,
) -> Result<(), String> {
    let connector =
        Connector::new(&address.to_string()).credentials(credentials.cloned()).task(TaskId::ps(0));
    let connected = connector.connect(Connector::LIMIT).await;
    let connected = connected.map_err(|error| Chain(&error).to_string())?;
    let mut frames = FrameStream::new(connected.stream, FrameReader::new());
    let greeted = say_hello(&mut frames, credentials, Envelope::default(), hello(role, task)).await;
    greeted.map_err(|error| Chain(&error).to_string())?;
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), &Heartbeat {}.into(), BodyStamp::NONE);
    for _ in 0..2 {
        match frames.next().await.map_err(|error| Chain(&error).to_string())? {
            (_, Message::Refused(refused)) => return Err(refused.refusal.to_string()),
            (_, message) => assert_eq!(message, answer()),
        }
        frames.send(&frame).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// A folder with a file of tokens.
struct Tokens(tempfile::TempDir);

impl Tokens {
    fn new(lines: &str) -> Tokens {
        let tokens = Tokens(tempfile::tempdir().unwrap());
        tokens.write(lines);
        tokens
    }

    fn write(&self, lines: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.0.path().join("tokens");
        let new = self.0.path().join("new");
        std::fs::write(&new, lines).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    fn files(&self) -> CredentialFiles {
        CredentialFiles::new().tokens(self.0.path().join("tokens"))
    }

    fn open(&self) -> Credentials {
        self.files().open().unwrap()
    }
}

fn trainers() -> String {
    format!("token trainers {TRAINERS} roles=worker tasks=/job:worker/task:*\n")
}

const WORKER: Role = Role::Worker {};

#[test]
fn a_token_lets_its_tasks_in() {
    let servers = Tokens::new(&format!("token readers {OTHERS} roles=reader\n{}", trainers()));
    let clients = Tokens::new(&trainers());
    with_door(Some(servers.open()), async |seen, address| {
        let clients = clients.open();
        visit(address, Some(&clients), WORKER, &TaskId::worker(3)).await.unwrap();
        let proven = seen.proven.borrow();
        assert_eq!(proven[0].as_ref().unwrap().principal.name, "trainers");
        assert!(seen.denied.borrow().is_empty());
    });
}

/// Who is turned away, what the operator learns, and what the client does.
#[test]
fn those_who_prove_nothing_get_one_answer() {
    let servers = Tokens::new(&format!("token readers {OTHERS} roles=reader\n{}", trainers()));
    let anybody = format!("token trainers {TRAINERS} roles=worker,chief,reader\n");
    let unknown = format!("token nobody {TRAINERS} roles=worker\n");
    let guessed = format!("token trainers {OTHERS} roles=worker\n");
    let unproven =
        |name: &str| format!("the server does not prove that it knows the access token {name}");
    let denied = || "denied".to_owned();
    let other = "trainers may not be this task in this role";
    let without = "it has neither a token nor a certificate";
    // Clients that do not check the proof of the server are in `strangers`.
    let table = [
        (None, WORKER, TaskId::worker(0), denied(), Some(without)),
        (Some(&anybody), Role::Chief {}, TaskId::worker(0), denied(), Some(other)),
        (Some(&anybody), WORKER, TaskId::ps(0), denied(), Some(other)),
        (Some(&anybody), Role::Reader {}, TaskId::worker(0), denied(), Some(other)),
        (Some(&unknown), WORKER, TaskId::worker(0), unproven("nobody"), None),
        (Some(&guessed), WORKER, TaskId::worker(0), unproven("trainers"), None),
    ];
    for (clients, role, task, told, cause) in table {
        with_door(Some(servers.open()), async |seen, address| {
            let clients = clients.map(|lines| Tokens::new(lines).open());
            let visited = visit(address, clients.as_ref(), role, &task).await;
            assert_eq!(visited, Err(told), "{role:?} as {task}");
            assert!(seen.proven.borrow().is_empty());
            let denied = seen.denied.borrow();
            assert_eq!(denied.iter().map(|denied| &*denied.cause).next(), cause);
            if let Some(denied) = denied.first() {
                assert_eq!((&*denied.host, denied.attempts), ("127.0.0.1", 1));
                assert_eq!(denied.claim, Some((role, task)));
                assert_eq!(*seen.without.borrow(), [NoHello::Denied]);
            }
        });
    }
}

#[test]
fn a_client_with_a_token_trusts_no_server_that_does_not_ask_for_it() {
    let clients = Tokens::new(&trainers()).open();
    with_door(None, async |_, address| {
        let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
        let told = "the server has answered HeartbeatAnswer to the offer of the access token \
                    trainers, not a challenge";
        assert_eq!(visited, Err(told.to_owned()));
    });
}

#[test]
fn a_client_that_proves_falsely_is_denied() {
    let servers = Tokens::new(&trainers());
    with_door(Some(servers.open()), async |seen, address| {
        for name in ["trainers", "unknown"] {
            let stream = Stream::tcp(tokio::net::TcpStream::connect(address).await.unwrap());
            let mut frames = FrameStream::new(stream.unwrap(), FrameReader::new());
            let mut hello = hello(WORKER, &TaskId::worker(0));
            hello.auth = Some(
                pushpull_common::protocol::message::AuthOffer {
                    token: Text::clipped(name),
                    nonce: [1; 32],
                }
                .into(),
            );
            let send = async |frames: &mut FrameStream, message: Message| {
                let mut frame = Vec::new();
                encode(&mut frame, &Envelope::default(), &message, BodyStamp::NONE);
                frames.send(&frame).await.unwrap();
                frames.next().await
            };
            let challenge = match send(&mut frames, hello.into()).await.unwrap().1 {
                Message::Challenge(challenge) => challenge,
                other => panic!("{other:?}"),
            };
            // It sends back what it has heard.
            let proof = challenge.proof;
            let answer = pushpull_common::protocol::message::ChallengeAnswer { proof };
            match send(&mut frames, answer.into()).await.unwrap().1 {
                Message::Refused(refused) => assert_eq!(refused.refusal.to_string(), "denied"),
                other => panic!("{other:?}"),
            }
            assert!(frames.next().await.is_err(), "the connection has ended");
        }
        let denied = seen.denied.borrow();
        let told = "it does not know the secret of a token of the name trainers";
        assert_eq!(denied.iter().map(|of| &*of.cause).collect::<Vec<_>>(), [told]);
        assert_eq!(*seen.without.borrow(), [NoHello::Denied, NoHello::Denied]);
    });
}

#[test]
fn a_list_that_changes_holds_at_the_next_look() {
    let servers = Tokens::new(&trainers());
    let credentials = servers.open();
    let clients = Tokens::new(&trainers()).open();
    with_door(Some(credentials.clone()), async |seen, address| {
        visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await.unwrap();
        let proven = seen.proven.borrow()[0].clone().unwrap();
        assert!(credentials.still_admit(&proven));
        let look_again = || tokio::time::sleep(Duration::from_millis(300));

        // A second token beside the first changes nothing for its owner.
        let second = format!("token trainers-2 {OTHERS} roles=worker\n");
        servers.write(&format!("{}{second}", trainers()));
        look_again().await;
        assert!(credentials.still_admit(&proven));

        // What cannot be read changes nothing, and is told.
        servers.write("token trainers");
        look_again().await;
        let problem = Chain(&*credentials.problem().unwrap()).to_string();
        assert!(
            problem.ends_with(
                "line 1 is no entry: it has no secret: the secret has 0 bits, not 128 to 512"
            ),
            "{problem}"
        );
        assert!(credentials.still_admit(&proven));

        for revoked in [second.clone(), trainers().replace(TRAINERS, OTHERS)] {
            servers.write(&revoked);
            look_again().await;
            assert!(credentials.problem().is_none());
            assert!(!credentials.still_admit(&proven), "{revoked}");
            let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(visited.unwrap_err().starts_with("the server does not prove"));
        }
    });
}

#[test]
fn files_that_others_can_read_or_that_say_nothing_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let tokens = Tokens::new(&trainers());
    let path = tokens.0.path().join("tokens");
    let told = |files: CredentialFiles| Chain(&files.open().unwrap_err()).to_string();
    for mode in [0o644, 0o640, 0o604, 0o660] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        // A file of root that a group of the process can read is one that Kubernetes mounts.
        if rustix::process::geteuid().is_root() && mode & 0o007 == 0 {
            continue;
        }
        let end =
            format!("its mode {mode:o} lets others read it, so its secrets are none; chmod 600 it");
        assert_eq!(told(tokens.files()), format!("cannot use {}: {end}", path.display()));
    }
    tokens.write("");
    assert_eq!(
        told(tokens.files()),
        format!(
            "cannot use {}: it has no token and no certificate, so nobody could connect",
            path.display()
        )
    );
    let absent = CredentialFiles::new().tokens(tokens.0.path().join("absent"));
    assert!(told(absent).contains("absent: No such file"));
    let folder = CredentialFiles::new().tokens(tokens.0.path());
    assert!(told(folder).ends_with("it is no plain file"));
}

#[cfg(feature = "tls")]
mod tls {
    use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};

    use super::*;
    use crate::tests::authority::{Authority, Says, write_secret};

    #[test]
    fn a_certificate_is_the_task_that_it_names() {
        let authority = Authority::new();
        authority.sign("ps", Says { names: &["/job:ps/task:0"], ..Says::default() });
        authority.sign("w1", Says { names: &["/job:worker/task:1"], ..Says::default() });
        authority.sign("w", Says { names: &["/job:worker/task:*"], ..Says::default() });
        let servers = authority.files("ps").open().unwrap();
        with_door(Some(servers), async |seen, address| {
            let one = authority.files("w1").open().unwrap();
            let any = authority.files("w").open().unwrap();
            let denied = Err("denied".to_owned());
            let chief = Role::Chief {};
            assert_eq!(visit(address, Some(&one), WORKER, &TaskId::worker(1)).await, Ok(()));
            assert_eq!(visit(address, Some(&one), WORKER, &TaskId::worker(0)).await, denied);
            assert_eq!(visit(address, Some(&one), chief, &TaskId::worker(1)).await, denied);
            assert_eq!(visit(address, Some(&any), WORKER, &TaskId::worker(7)).await, Ok(()));
            assert_eq!(visit(address, Some(&any), chief, &TaskId::worker(0)).await, Ok(()));
            assert_eq!(
                visit(address, Some(&any), Role::Reader {}, &TaskId::worker(0)).await,
                denied
            );
            let names: Vec<String> =
                seen.proven.borrow().iter().flatten().map(|of| of.principal.name.clone()).collect();
            assert_eq!(names, ["/job:worker/task:1", "/job:worker/task:*", "/job:worker/task:*"]);
        });
    }

    /// What a client says of servers whose certificates are not what they must be.
    #[test]
    fn servers_with_wrong_certificates_are_not_spoken_to() {
        let authority = Authority::new();
        let stranger = Authority::new();
        let peer = "invalid peer certificate: certificate ";
        let other = "it is the certificate of /job:ps/task:1, not of /job:ps/task:0".to_owned();
        let says = |names| Says { names, ..Says::default() };
        let table = [
            ("host", says(&["127.0.0.1"]), None),
            ("task", says(&["/job:ps/task:0"]), None),
            ("tasks", says(&["/job:ps/task:*"]), None),
            (
                "old",
                Says { years: (2020, 2021), ..Says::default() },
                Some(format!("{peer}expired: ")),
            ),
            (
                "new",
                Says { years: (2090, 2099), ..Says::default() },
                Some(format!("{peer}not valid yet: ")),
            ),
            (
                "elsewhere",
                says(&["10.0.0.1", "example.org"]),
                Some(format!("{peer}not valid for name ")),
            ),
            ("ps1", says(&["/job:ps/task:1", "127.0.0.1"]), Some(other)),
            (
                "client",
                Says { usages: &[ClientAuth], ..Says::default() },
                Some(format!("{peer}does not allow extended key usage ")),
            ),
        ];
        for (name, says, fault) in table {
            authority.sign(name, says);
            let servers = authority.files(name).open().unwrap();
            with_door(Some(servers), async |seen, address| {
                let clients = Tokens::new(&trainers());
                let clients = clients.files().authority(authority.path("ca.pem")).open().unwrap();
                let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
                let Some(fault) = fault else {
                    // The server has a certificate and no tokens.
                    let told = visited.unwrap_err();
                    assert!(told.starts_with("denied"), "{name}: {told}");
                    return;
                };
                let told = visited.unwrap_err();
                let begin = format!("cannot speak TLS with {address}: {fault}");
                assert!(told.starts_with(&begin), "{name}: {told}");
                assert!(seen.proven.borrow().is_empty());
            });
        }
        stranger.sign("self", Says::default());
        with_door(Some(stranger.files("self").open().unwrap()), async |_, address| {
            let clients = authority.trusting().open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(told.unwrap_err().ends_with("invalid peer certificate: UnknownIssuer"));
        });
    }

    /// What an operator learns of clients whose certificates are not what they must be.
    #[test]
    fn clients_with_wrong_certificates_are_denied() {
        let authority = Authority::new();
        let stranger = Authority::new();
        authority.sign("ps", Says::default());
        stranger.sign("self", Says { names: &["/job:worker/task:0"], ..Says::default() });
        let worker = &["/job:worker/task:0"];
        authority.sign("old", Says { names: worker, years: (2020, 2021), ..Says::default() });
        authority.sign("new", Says { names: worker, years: (2090, 2099), ..Says::default() });
        authority.sign("server", Says { names: worker, usages: &[ServerAuth], ..Says::default() });
        let own = |of: &Authority, name: &str| {
            let path = |end: &str| of.path(&format!("{name}.{end}"));
            authority.trusting().certificate(path("pem"), path("key")).open().unwrap()
        };
        let table = [
            (own(&stranger, "self"), "UnknownIssuer"),
            (own(&authority, "old"), "certificate expired"),
            (own(&authority, "new"), "certificate not valid yet"),
            (own(&authority, "server"), "certificate does not allow extended key usage"),
        ];
        for (clients, cause) in table {
            let servers = authority.files("ps").open().unwrap();
            with_door(Some(servers), async |seen, address| {
                let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
                assert!(visited.is_err(), "{cause}");
                let denied = seen.denied.borrow();
                assert!(denied[0].cause.contains(cause), "{}", denied[0].cause);
                assert_eq!(denied[0].claim, None);
                assert!(seen.proven.borrow().is_empty());
            });
        }
    }

    #[test]
    fn sides_without_tls_learn_what_they_have_met() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        let task = TaskId::worker(0);
        with_door(Some(authority.files("ps").open().unwrap()), async |_, address| {
            let told = visit(address, None, WORKER, &task).await.unwrap_err();
            assert!(told.ends_with("this server speaks TLS only"), "{told}");
        });
        with_door(None, async |_, address| {
            let clients = authority.files("ps").open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &task).await.unwrap_err();
            let begin = format!("cannot speak TLS with {address}");
            assert_eq!(told, format!("{begin}: the other side speaks without TLS"));
        });
    }

    #[test]
    fn a_token_over_tls_is_bound_to_its_channel() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        write_secret(&authority.path("tokens"), &trainers());
        let servers = authority.files("ps").tokens(authority.path("tokens")).open().unwrap();
        with_door(Some(servers), async |seen, address| {
            let clients = authority.trusting().tokens(authority.path("tokens")).open().unwrap();
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            assert_eq!(seen.proven.borrow()[0].as_ref().unwrap().principal.name, "trainers");
            let stranger = authority.trusting().open().unwrap();
            let visited = visit(address, Some(&stranger), WORKER, &TaskId::worker(0)).await;
            assert_eq!(visited, Err("denied".to_owned()));
        });
    }

    #[test]
    fn the_next_connection_uses_a_certificate_that_was_replaced() {
        let authority = Authority::new();
        authority.sign("ps", Says { names: &["/job:ps/task:1"], ..Says::default() });
        authority.sign("w", Says { names: &["/job:worker/task:*"], ..Says::default() });
        let servers = authority.files("ps").open().unwrap();
        with_door(Some(servers.clone()), async |_, address| {
            let clients = authority.files("w").open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(told.unwrap_err().ends_with("not of /job:ps/task:0"));
            authority.sign("ps", Says { names: &["/job:ps/task:0"], ..Says::default() });
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            // A key that is not that of the certificate: what was there before holds.
            std::fs::copy(authority.path("w.key"), authority.path("ps.key")).unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            let problem = Chain(&*servers.problem().unwrap()).to_string();
            assert!(problem.ends_with("its key is not that of the certificate"), "{problem}");
        });
    }
}
