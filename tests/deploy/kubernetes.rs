//! The Kubernetes manifests: their schemas, the names by which they refer to each other, and the
//! commands of their pods, which train on loopback.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pushpull::cluster::resolve::{Known, Resolution, ResolveError, resolve};
use serde_json::Value;

use crate::Outcome;
use crate::tasks::{PORT, Programs, Task, Tasks};

/// The newest version whose schemas the validator has.
const VERSION: &str = "1.37.0";

/// The folder of the manifests.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/deploy/kubernetes");

/// The manifests with objects of Kubernetes itself.
const MANIFESTS: [&str; 5] = [
    "ring.yaml",
    "base/checkpoints.yaml",
    "base/network-policy.yaml",
    "base/ps.yaml",
    "base/worker.yaml",
];

/// Prints all documents of files as one JSON list.
const READ: &str = "import json, sys, yaml\n\
    print(json.dumps([d for f in sys.argv[1:] for d in yaml.safe_load_all(open(f))]))";

/// Reads a runtime through the models of its API, which refuse values of another type, and prints the
/// fields that are lost on the way: those that the API does not have.
const READ_RUNTIME: &str = "import sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime as Runtime
def lost(path, written, read):
    if isinstance(written, dict):
        for key in written:
            if isinstance(read, dict) and key in read: lost(path + '.' + key, written[key], read[key])
            else: print(path + '.' + key)
    elif isinstance(written, list):
        for index, pair in enumerate(zip(written, read)): lost(f'{path}[{index}]', *pair)
    elif written != read: print(path)
runtime = yaml.safe_load(open(sys.argv[1]))
if len(sys.argv) > 2: runtime['spec']['template']['spec']['sucessPolicy'] = {}
lost('', runtime, Runtime.from_dict(runtime).to_dict())";

/// The programs that read manifests.
pub(crate) struct Tools {
    folder: PathBuf,
}

impl Tools {
    /// Finds the virtual environment, or says what is absent.
    pub(crate) fn find() -> Result<Tools, String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/kubernetes/bin");
        match folder.join("kubernetes-validate").is_file() {
            true => Ok(Tools { folder }),
            false => Err(format!("there is no kubernetes-validate in {}", folder.display())),
        }
    }

    /// Runs a program of the environment. Returns its output, and its errors if it fails.
    fn run(&self, program: &str, arguments: &[&str]) -> Outcome {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "120"]).arg(self.folder.join(program)).args(arguments);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(text(output.stdout) + &text(output.stderr)),
        }
    }

    /// Returns the objects of manifests.
    fn objects(&self, manifests: &[&str]) -> Result<Vec<Value>, String> {
        let files: Vec<String> = manifests.iter().map(|name| format!("{FOLDER}/{name}")).collect();
        let mut arguments = vec!["-c", READ];
        arguments.extend(files.iter().map(String::as_str));
        let text = self.run("python", &arguments)?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }
}

/// Validates each manifest against the schemas. One with a fault shows that it would be found.
pub(crate) fn validate(tools: &Tools) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let faulty = folder.path().join("faulty.yaml");
    let right = std::fs::read_to_string(format!("{FOLDER}/base/ps.yaml")).unwrap();
    for (field, fault) in [("replicas: 2", "replicas: two"), ("containerPort", "containerPrt")] {
        std::fs::write(&faulty, right.replace(field, fault)).unwrap();
        let faulty = faulty.display().to_string();
        if tools.run("kubernetes-validate", &["--strict", "-k", VERSION, &faulty]).is_ok() {
            return Err(format!("no fault is found in {fault:?}"));
        }
    }
    for manifest in MANIFESTS {
        let file = format!("{FOLDER}/{manifest}");
        tools.run("kubernetes-validate", &["--strict", "-k", VERSION, &file])?;
    }
    Ok(format!("{} manifests are valid for {VERSION}", MANIFESTS.len()))
}

/// Reads the runtime of Kubeflow Trainer through the models of its API.
pub(crate) fn validate_runtime(tools: &Tools) -> Outcome {
    let file = format!("{FOLDER}/training-runtime.yaml");
    let lost = tools.run("python", &["-c", READ_RUNTIME, &file, "with a fault"])?;
    if !lost.contains("sucessPolicy") {
        return Err(format!("a field that the API lacks is not found: {lost:?}"));
    }
    match tools.run("python", &["-c", READ_RUNTIME, &file])?.trim() {
        "" => Ok("the API has every field".to_owned()),
        lost => Err(format!("the API does not have {lost}")),
    }
}

/// Returns the object of a kind and name.
fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value, String> {
    let is_it = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    objects.iter().find(is_it).ok_or_else(|| format!("there is no {kind} {name}"))
}

/// Returns the template of the pods of a StatefulSet or a Job.
fn pod(owner: &Value) -> &Value {
    &owner["spec"]["template"]
}

/// Returns the command and arguments of the only container of a pod.
fn command(pod: &Value) -> Vec<String> {
    let container = &pod["spec"]["containers"][0];
    let words = ["command", "args"].into_iter().filter_map(|field| container[field].as_array());
    words.flatten().filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

/// Returns whether the labels of a pod satisfy a selector.
fn selects(labels: &Value, pod: &Value) -> bool {
    let labels = labels.as_object().filter(|labels| !labels.is_empty());
    labels.is_some_and(|labels| {
        labels.iter().all(|(name, value)| pod["metadata"]["labels"][name] == *value)
    })
}

/// Checks the names by which the objects refer to each other, which no schema knows.
pub(crate) fn check_names(tools: &Tools) -> Outcome {
    let objects = tools.objects(&MANIFESTS[1..])?;
    let servers = object(&objects, "StatefulSet", "ps")?;
    let workers = object(&objects, "Job", "worker")?;
    let service = object(&objects, "Service", servers["spec"]["serviceName"].as_str().unwrap())?;
    let expect = |is_right: bool, what: &str| if is_right { Ok(()) } else { Err(what.to_owned()) };

    let server = pod(servers);
    expect(selects(&service["spec"]["selector"], server), "the service selects no ps task")?;
    let selector = |object: &Value| object["spec"]["selector"]["matchLabels"].clone();
    expect(selects(&selector(servers), server), "the StatefulSet selects none of its pods")?;
    let budget = object(&objects, "PodDisruptionBudget", "ps")?;
    expect(selects(&selector(budget), server), "the disruption budget selects no ps task")?;
    for (name, pod) in [("ps", server), ("worker", pod(workers))] {
        let policy = object(&objects, "NetworkPolicy", name)?;
        let labels = &policy["spec"]["podSelector"]["matchLabels"];
        expect(selects(labels, pod), &format!("the network policy {name} selects no pod"))?;
    }
    let policy = &object(&objects, "NetworkPolicy", "ps")?["spec"]["ingress"][0];
    let admitted = &policy["from"][0]["podSelector"]["matchExpressions"][0];
    for pod in [server, pod(workers)] {
        let label = &pod["metadata"]["labels"][admitted["key"].as_str().unwrap()];
        let values = admitted["values"].as_array().unwrap();
        expect(values.contains(label), &format!("the network policy keeps out {label}"))?;
    }

    let container = &server["spec"]["containers"][0];
    let port = &container["ports"][0];
    expect(port["containerPort"].as_u64() == PORT.parse().ok(), "the port of a ps task")?;
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        expect(container[probe]["tcpSocket"]["port"] == port["name"], probe)?;
    }
    expect(policy["ports"][0]["port"] == port["name"], "the port of the network policy")?;
    let volumes = server["spec"]["volumes"].as_array().unwrap();
    for mount in container["volumeMounts"].as_array().unwrap() {
        let name = &mount["name"];
        expect(volumes.iter().any(|volume| volume["name"] == *name), &format!("volume {name}"))?;
    }
    let claim =
        volumes.iter().find_map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str());
    object(&objects, "PersistentVolumeClaim", claim.ok_or("no volume is a claim")?)?;

    for (owner, job) in [(servers, "ps"), (workers, "worker")] {
        let resolved = resolve_pod(owner, count(owner) - 1)?;
        let found: Vec<String> =
            resolved.cluster.ps_tasks().map(|(_, address)| address.to_owned()).collect();
        let listed = server_names(servers);
        expect(found == listed, &format!("{job} finds {found:?}, and the pods are {listed:?}"))?;
        let task = resolved.task.map(|task| task.to_string());
        let last = format!("/job:{job}/task:{}", count(owner) - 1);
        expect(task.as_deref() == Some(&last), &format!("{task:?} is not {last}"))?;
    }
    let given = flag(&command(pod(workers)), "--num-workers=")?;
    expect(given == count(workers).to_string(), &format!("--num-workers={given}"))?;

    let kustomization = tools.objects(&["base/kustomization.yaml"])?;
    let resources = kustomization[0]["resources"].as_array().unwrap();
    for manifest in &MANIFESTS[1..] {
        let name = manifest.trim_start_matches("base/");
        expect(
            resources.iter().any(|resource| resource == name),
            &format!("{name} is not listed"),
        )?;
    }
    Ok(format!("{} objects fit each other", objects.len()))
}

/// Returns the number of pods of a StatefulSet or a Job.
fn count(owner: &Value) -> u64 {
    let spec = &owner["spec"];
    spec["replicas"].as_u64().or(spec["completions"].as_u64()).unwrap()
}

/// Returns the value of a flag that ends in `=`.
fn flag(command: &[String], flag: &str) -> Result<String, String> {
    let value = command.iter().find_map(|word| word.strip_prefix(flag));
    value.map(str::to_owned).ok_or_else(|| format!("there is no {flag} in {command:?}"))
}

/// Returns the variables that Kubernetes sets in a pod of a StatefulSet or an Indexed Job.
fn variables(owner: &Value, index: u64) -> Vec<(&'static str, String)> {
    let name = format!("{}-{index}", owner["metadata"]["name"].as_str().unwrap());
    let mut variables =
        vec![("KUBERNETES_SERVICE_HOST", "10.0.0.1".to_owned()), ("HOSTNAME", name)];
    if owner["kind"] == "Job" {
        variables.push(("JOB_COMPLETION_INDEX", index.to_string()));
    }
    variables
}

/// Returns what the command of a pod finds by its variables and its flags.
fn resolve_pod(owner: &Value, index: u64) -> Result<Resolution, String> {
    let command = command(pod(owner));
    let mut known = Known::default();
    known.num_ps = flag(&command, "--num-ps=")?.parse().ok();
    known.ps_service = flag(&command, "--ps-service=").ok();
    let variables = variables(owner, index);
    let lookup = |name: &str| {
        variables.iter().find_map(|(variable, value)| (*variable == name).then(|| value.clone()))
    };
    let resolver =
        flag(&command, "--resolve=")?.parse().map_err(|error: ResolveError| error.to_string())?;
    resolve(resolver, &lookup, &known).map_err(|error| error.to_string())
}

/// Returns the addresses of the pods of a StatefulSet.
fn server_names(servers: &Value) -> Vec<String> {
    let name = servers["metadata"]["name"].as_str().unwrap();
    let service = servers["spec"]["serviceName"].as_str().unwrap();
    (0..count(servers)).map(|index| format!("{name}-{index}.{service}:{PORT}")).collect()
}

/// Trains with the commands of the pods, as the kubelet would start them.
pub(crate) fn train(tools: &Tools, programs: &Programs) -> Outcome {
    let objects = tools.objects(&MANIFESTS[1..])?;
    let servers = object(&objects, "StatefulSet", "ps")?;
    let workers = object(&objects, "Job", "worker")?;
    let names = server_names(servers);
    let tasks_of = |owner: &Value| -> Vec<Task> {
        // Loopback has no name of a pod.
        let addresses = format!("--ps-hosts={}", names.join(","));
        let command: Vec<String> = command(pod(owner)).into_iter().chain([addresses]).collect();
        let task = |index| Task { command: command.clone(), variables: variables(owner, index) };
        (0..count(owner)).map(task).collect()
    };
    // The mounts of the ps tasks, by the kind of their volume.
    let mounts = |kind: &str| -> Vec<String> {
        let spec = &pod(servers)["spec"];
        let mounts = spec["containers"][0]["volumeMounts"].as_array().unwrap();
        let volumes = spec["volumes"].as_array().unwrap();
        let is_of_kind = |mount: &&Value| {
            volumes.iter().any(|it| it["name"] == mount["name"] && it[kind].is_object())
        };
        let paths = mounts.iter().filter(is_of_kind).map(|mount| &mount["mountPath"]);
        paths.filter_map(|path| path.as_str().map(str::to_owned)).collect()
    };
    let tasks = Tasks {
        servers: tasks_of(servers),
        workers: tasks_of(workers),
        names: server_names(servers),
        own_volumes: mounts("emptyDir"),
        shared_volumes: mounts("persistentVolumeClaim"),
    };
    tasks.train(programs)
}
