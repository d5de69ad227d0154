# The whole race on one page: data -> trainer -> runs -> composed curves -> tables and figures -> page.
#
#   snakemake --cores all                                          the default experiment
#   snakemake --cores all --config experiment=config/full.yaml    another one
#   snakemake -n                                                   what would be done
#
# Each rule calls one command that a person can type too. A run that fails (its system crashed, was skipped, ran out
# of time) is a result: its records say so and the page shows it. A launcher that fails is an error.
# A run's stamp (RUN.done) stands beside the folder of its records, so Snakemake never deletes records.

from dslide.plan import Plan

plan = Plan(config.get("experiment", "config/default.yaml"))


wildcard_constraints:
    kind="runs|paces|checks|sweep",
    system=r"[^/]+",
    cluster=r"[^/]+",
    seed=r"\d+",


rule page:
    message: f"Page {plan.reports}/index.html"
    input:
        experiment=plan.file,
        records=[*plan.runs, *plan.composed],
        tables=expand(f"{plan.results}/tables/{{name}}.csv", name=plan.report_files("table")),
        figures=expand(f"{plan.reports}/{{name}}.svg", name=plan.report_files("figure")),
    output: f"{plan.reports}/index.html"
    log: f"{plan.results}/logs/page.log"
    params: results=lambda wildcards: plan.results
    resources: machine=1
    localrule: True
    conda: "envs/dslide.yaml"
    shell:
        "python -m dslide.reporting page --experiment {input.experiment} --results {params.results}"
        " --out {output} 2> {log}"


rule figure:
    message: "Figure {wildcards.name}"
    input: experiment=plan.file, records=[*plan.runs, *plan.composed], source=plan.report_source
    output: multiext(f"{plan.reports}/{{name}}", svg=".svg", png=".png", sidecar=".json")
    log: f"{plan.results}/logs/figures/{{name}}.log"
    params: results=lambda wildcards: plan.results
    resources: machine=1
    localrule: True
    conda: "envs/dslide.yaml"
    shell:
        "python -m dslide.reporting figure {wildcards.name} --experiment {input.experiment}"
        " --results {params.results} --out {output.svg} 2> {log}"


rule table:
    message: "Table {wildcards.name}"
    input: experiment=plan.file, records=[*plan.runs, *plan.composed], source=plan.report_source
    output: multiext(f"{plan.results}/tables/{{name}}", csv=".csv", html=".html")
    log: f"{plan.results}/logs/tables/{{name}}.log"
    params: results=lambda wildcards: plan.results
    resources: machine=1
    localrule: True
    conda: "envs/dslide.yaml"
    shell:
        "python -m dslide.reporting table {wildcards.name} --experiment {input.experiment}"
        " --results {params.results} --out {output.csv} 2> {log}"


rule compose:
    message: "{params.what}"
    input: unpack(plan.parts)
    output: f"{plan.results}/composed/{{system}}/{{cluster}}/seed-{{seed}}.done"
    log: f"{plan.results}/logs/composed/{{system}}/{{cluster}}/seed-{{seed}}.log"
    params: what=plan.what, check=plan.check
    resources: machine=1
    localrule: True
    conda: "envs/dslide.yaml"
    shell:
        "dslide race compose {input.curve} {input.pace} {output} {params.check} > {log} 2>&1"


rule run:
    message: "{params.what}"
    input: data=plan.data, trainer=plan.trainer, experiment=ancient(plan.file)
    output: f"{plan.results}/{{kind}}/{{system}}/{{cluster}}/seed-{{seed}}.done"
    log: f"{plan.results}/logs/{{kind}}/{{system}}/{{cluster}}/seed-{{seed}}.log"
    params:
        run="{kind}/{system}/{cluster}/seed-{seed}",
        spec=f"{plan.results}/specs/{{kind}}/{{system}}/{{cluster}}/seed-{{seed}}.json",
        what=plan.what,
        digest=plan.digest,
    threads: plan.threads
    resources:
        machine=100,
        tasks=plan.real_nodes,
        nodes=plan.real_nodes,
        mpi=lambda wildcards: "mpirun" if plan.real_nodes(wildcards) > 1 else "",
    conda: "envs/dslide.yaml"
    shell:
        "{{ dslide race spec {input.experiment} {params.run} --granted {threads} --out {params.spec}"
        " && summary=$(dslide race run {params.spec}) && echo \"$summary\" > {output}; }} 2>&1 | tee -i {log} >&2"


rule trainer:
    message: "C++ trainer: compile what changed"
    output: touch("build/trainer-{digest}.built")
    log: "build/trainer-{digest}.log"
    params: root=workflow.basedir
    resources: machine=100  # the installed package changes: nothing may run meanwhile
    localrule: True
    conda: "envs/dslide.yaml"
    shell: "make -C {params.root} build > {log} 2>&1"


rule data:
    message: f"Data set {plan.experiment.data}: prepare"
    input: experiment=ancient(plan.file)
    output: plan.data
    log: f"{plan.results}/logs/data.log"
    resources: machine=1
    localrule: True
    retries: 2
    conda: "envs/dslide.yaml"
    shell: "dslide race data {input.experiment} 2>&1 | tee -i {log} >&2"
